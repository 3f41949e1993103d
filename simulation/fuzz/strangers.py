"""Attacking processes: each opens connections to listening sockets, sends the bytes of a maker, and disconnects or
stays silent.

They run at the lowest scheduling priority (SCHED_IDLE): a real attacker computes on another machine, and only the work
that its bytes cause here counts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue

from simulation.fuzz.http_bytes import HttpMaker
from simulation.fuzz.zmtp import Handshake, Step, ZmtpMaker

_HELD = 64  # connections that one attacker leaves open
_ANSWER_S = 0.2
_COUNTS_S = 5.0
_WELCOME_BYTES = 64 + 2 + 168


@dataclass(frozen=True, slots=True)
class Target:
    """An address. `public`: the public key of a control socket's owner, if known. `http`: it is an HTTP port."""

    host: str
    port: int
    public: bytes | None = None
    http: bool = False


@dataclass(frozen=True, slots=True)
class Wave:
    """What was sent by one wave of attackers, and those that ended badly."""

    frames: int
    connections: int
    faults: list[str]


def waves(targets: Sequence[Target], frames: int, processes: int, seed: int) -> Iterator[Wave]:
    """Attack twice: a first attack with a fifth of `frames` warms up, and growth is measured over the second. Yields
    when all attackers have exited.
    """
    spawn = multiprocessing.get_context("spawn")
    for wave, share in enumerate((frames // 5, frames - frames // 5)):
        sent: Queue[tuple[int, int]] = spawn.Queue()
        args = [(seed * 1000 + wave * 100 + i, share // processes, targets, sent) for i in range(processes)]
        attackers = [spawn.Process(target=attack, args=one, daemon=True) for one in args]
        for attacker in attackers:
            attacker.start()
        for attacker in attackers:
            attacker.join()
        codes = [attacker.exitcode for attacker in attackers if attacker.exitcode]
        totals = [sent.get(timeout=_COUNTS_S) for _ in range(processes - len(codes))]
        faults = [f"an attacker ended with {code}" for code in codes]
        yield Wave(sum(n for n, _ in totals), sum(n for _, n in totals), faults)


def attack(seed: int, frames: int, targets: Sequence[Target], sent: Queue[tuple[int, int]]) -> None:
    """Send `frames` frames. The main function of an attacking process. Puts the numbers of frames and connections into
    `sent`.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    rng = random.Random(seed)
    makers = [(target, HttpMaker(rng) if target.http else ZmtpMaker(rng, target.public)) for target in targets]
    held: deque[socket.socket] = deque()
    left, connections = frames, 0
    while left > 0:
        target, maker = rng.choice(makers)
        sock = socket.socket()
        sock.settimeout(_ANSWER_S)
        # Reset on close, so that the port is free at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            sock.connect((target.host, target.port))
        except ConnectionRefusedError:
            break  # the listener is gone
        except OSError:
            continue
        connections += 1
        with contextlib.suppress(OSError):
            for step in _resolved(maker, sock):
                left -= step.frames
                sock.sendall(step.data)
        held.append(sock)
        while len(held) > (_HELD if rng.random() < 0.98 else 0):
            held.popleft().close()
    for sock in held:
        sock.close()
    sent.put((frames - left, connections))


def _resolved(maker: ZmtpMaker | HttpMaker, sock: socket.socket) -> Iterator[Step]:
    """The steps of a connection; INITIATE is made from the answer."""
    heard = b""
    for step in maker.steps():
        if isinstance(step, Handshake):
            assert isinstance(maker, ZmtpMaker)
            initiate = step.initiate(heard, maker.properties(), maker.rng)
            if initiate is not None:
                yield Step(initiate, 1)
            continue
        yield step
        if step.wait:
            with contextlib.suppress(OSError):
                while len(heard) < _WELCOME_BYTES and (part := sock.recv(4096)):
                    heard += part

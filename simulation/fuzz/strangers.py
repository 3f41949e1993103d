"""Attacking processes: each opens connections to listening sockets, sends the bytes of a maker, and disconnects or
stays silent.

They run at the lowest scheduling priority (SCHED_IDLE): a real attacker computes on another machine, and only the work
that its bytes cause here counts.
"""

from __future__ import annotations

import contextlib
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
_WELCOME_BYTES = 64 + 2 + 168


@dataclass(frozen=True, slots=True)
class Target:
    """An address. `public`: the public key of a control socket's owner, if known. `http`: it is an HTTP port."""

    host: str
    port: int
    public: bytes | None = None
    http: bool = False


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

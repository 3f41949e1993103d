"""Attacking processes: each opens connections to listening sockets, sends the bytes of a maker, and disconnects or
stays silent.

They run at the lowest scheduling priority (SCHED_IDLE): a real attacker computes on another machine, and only the work
that its bytes cause here counts.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue

from simulation.fuzz.http_bytes import HttpMaker
from simulation.fuzz.pool import Steps
from simulation.fuzz.zmtp import ZmtpMaker

_HELD = 64  # connections that one attacker leaves open
_WAITING = 128  # connections of one attacker that wait for an answer
_ANSWER_S = 0.2
_COUNTS_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """An address. `public`: the public key of a control socket's owner, if known. `http`: it is an HTTP port."""

    host: str
    port: int
    public: bytes | None = None
    http: bool = False


@dataclass(slots=True)
class Wave:
    """What was sent by one wave of attackers, and those that ended badly. `kinds`: the number of connections of each
    kind.
    """

    frames: int = 0
    connections: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Wave) -> None:
        self.frames, self.connections = self.frames + other.frames, self.connections + other.connections
        self.kinds.update(other.kinds)
        self.faults += other.faults


@contextlib.contextmanager
def _lowest_priority() -> Iterator[None]:
    """Processes that this thread starts in here have the lowest scheduling priority from their first instruction."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def waves(targets: Sequence[Target], frames: int, processes: int, seed: int, rate: float = math.inf) -> Iterator[Wave]:
    """Attack twice: a first attack with a fifth of `frames` warms up, and growth is measured over the second. Yields
    when all attackers have exited. `rate`: the most frames per second that all attackers send together.
    """
    spawn = multiprocessing.get_context("spawn")
    for wave, share in enumerate((frames // 5, frames - frames // 5)):
        sent: Queue[Wave] = spawn.Queue()
        args = [
            (seed * 1000 + wave * 100 + i, share // processes, targets, sent, rate / processes)
            for i in range(processes)
        ]
        attackers = [spawn.Process(target=attack, args=one, daemon=True) for one in args]
        with _lowest_priority():
            for attacker in attackers:
                attacker.start()
        for attacker in attackers:
            attacker.join()
        codes = [attacker.exitcode for attacker in attackers if attacker.exitcode]
        total = Wave(faults=[f"an attacker ended with {code}" for code in codes])
        for _ in range(processes - len(codes)):
            total.add(sent.get(timeout=_COUNTS_S))
        yield total


def attack(seed: int, frames: int, targets: Sequence[Target], sent: Queue[Wave], rate: float) -> None:
    """Send `frames` frames. The main function of an attacking process. Puts what it sent into `sent`."""
    sent.put(Attacker(random.Random(seed), targets).run(frames, rate))


@dataclass(slots=True)
class Visit:
    """One connection that waits for `wanted` bytes of answers, at most until `until`."""

    sock: socket.socket
    steps: Steps
    heard: bytes = b""
    wanted: int = 0
    until: float = 0.0


class Attacker:
    """Makes connections one after the other, and continues with those whose answer has arrived."""

    def __init__(self, rng: random.Random, targets: Sequence[Target]) -> None:
        self._rng = rng
        self._makers = [(one, HttpMaker(rng) if one.http else ZmtpMaker(rng, one.public)) for one in targets]
        self._sent = Wave()
        self._held: deque[socket.socket] = deque()
        self._waiting: dict[int, Visit] = {}  # by descriptor, oldest first
        self._answers = select.epoll()

    def run(self, frames: int, rate: float = math.inf) -> Wave:
        """Send `frames` frames, at most `rate` a second, or stop if a listener is gone."""
        began = time.monotonic()
        while self._sent.frames < frames and self._connect():
            self._listen(0.0)
            while (early_s := began + self._sent.frames / rate - time.monotonic()) > 0:
                self._listen(min(early_s, _ANSWER_S))
            while len(self._waiting) >= _WAITING:
                self._listen(_ANSWER_S)
        while self._waiting:
            self._listen(_ANSWER_S)
        for sock in self._held:
            sock.close()
        self._answers.close()
        for _, maker in self._makers:
            self._sent.kinds.update(maker.kinds.made)
        return self._sent

    def _connect(self) -> bool:
        """Make one connection. Returns False if nobody listens."""
        target, maker = self._rng.choice(self._makers)
        sock = socket.socket()
        sock.settimeout(_ANSWER_S)
        # Reset on close, so that the port is free at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect((target.host, target.port))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        self._sent.connections += 1
        self._go_on(Visit(sock, maker.steps()), None)
        return True

    def _go_on(self, visit: Visit, heard: bytes | None) -> None:
        """Take the connection's steps until it has to wait, or hold it if it has no more. `heard`: the answer to the
        step before.
        """
        with contextlib.suppress(OSError, StopIteration):
            while True:
                step = visit.steps.send(heard)
                self._send(visit.sock, step.data)
                self._sent.frames += step.frames
                heard = None
                if step.wait:
                    visit.wanted, visit.until = step.wait, time.monotonic() + _ANSWER_S
                    self._waiting[visit.sock.fileno()] = visit
                    self._answers.register(visit.sock, select.EPOLLIN)
                    return
        self._held.append(visit.sock)
        while len(self._held) > (_HELD if self._rng.random() < 0.98 else 0):
            self._held.popleft().close()

    def _send(self, sock: socket.socket, data: bytes) -> None:
        """Sometimes in two pieces, so that the listener reads part of a frame."""
        at = self._rng.randrange(len(data)) if data and self._rng.random() < 0.1 else 0
        if at:
            sock.sendall(data[:at])
        sock.sendall(data[at:])

    def _listen(self, wait_s: float) -> None:
        """Continue with the connections that have an answer, and with those whose time is over."""
        for descriptor, _ in self._answers.poll(wait_s):
            visit = self._waiting[descriptor]
            try:
                part = visit.sock.recv(1 << 16)
            except OSError:
                part = b""
            visit.heard += part
            if not part or len(visit.heard) >= visit.wanted:
                self._answered(descriptor)
        now = time.monotonic()
        while self._waiting:
            descriptor, visit = next(iter(self._waiting.items()))
            if now < visit.until:
                break
            self._answered(descriptor)

    def _answered(self, descriptor: int) -> None:
        visit = self._waiting.pop(descriptor)
        self._answers.unregister(descriptor)
        self._go_on(visit, visit.heard)

"""The thread that owns a transfer library.

It sleeps in the lifeline while nobody copies. A peer announces its copies there before it issues them and says
when they ended, so that a library that needs the receiver's help gets it, and costs nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import TypeVar

import numpy as np

from baton.errors import BatonError, TransportError
from baton.transports.batches import Job
from baton.transports.library import BatchFailedError, Library, RemotePeer
from baton.transports.lifeline import BYE, Lifeline, Line

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
_POLL_S = (50e-6, 1e-3)  # pauses between polls: they double while nothing happens
_LINGER_S = 0.05  # how often an operation whose end cannot be proven yet is looked at
_IDLE_S = 1.0
_DRAIN_TURNS = 256  # each takes in 64 KiB of a line: 16 MiB, more than a socket holds
_BEGIN, _END = b"begin", b"end"
T = TypeVar("T")


class Driver:
    """A library, its lifeline, its peers, and the thread that serves them. `call` and `post` are for any thread."""

    def __init__(self, library: Library, host: str) -> None:
        """Start the library; raises what it raises."""
        self.lifeline = Lifeline(host)
        self.bounce = np.zeros(64, dtype=np.uint8)
        self.peers: list[RemotePeer] = []
        self._library = library
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._announced: dict[Line, int] = {}  # copies that peers have begun and not ended
        self.stopping = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"baton-{library.scheme}", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.lifeline.close()
            raise

    # ------------------------------------------------------------ any thread

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the thread, some time soon."""
        self._calls.put(action)
        self.lifeline.wake()

    def call(self, action: Callable[[], T]) -> T:
        """Run `action` on the thread and return what it returns or raise what it raises, as `TransportError` if
        it is no error of Baton's.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        try:
            return future.result(CALL_TIMEOUT_S)
        except TimeoutError as error:
            raise TransportError(f"the thread of the {self._library.scheme} transport does not answer") from error
        except BatonError:
            raise
        except Exception as error:  # what libraries raise has no common base class
            raise TransportError(f"{self._library.scheme}: {error}") from error

    def take_in(self) -> None:
        """See `Library.take_in`. After `stop` nothing arrives any more."""
        if not self.stopping:
            self.call(self._take_in)

    def stop(self) -> None:
        """End the library and the thread. Peers are told when nothing of this side is outstanding."""
        self.stopping = True
        self.lifeline.wake()
        self._thread.join()

    # ------------------------------------------------------------ the thread: peers and their jobs

    def add(self, peer: RemotePeer, metadata: bytes) -> None:
        """Take a peer in."""
        if not self._users(peer.endpoint):
            self._library.add(peer.endpoint, metadata)
        self.peers.append(peer)

    def remove(self, peer: RemotePeer) -> None:
        """Let go of a peer; with operations that cannot be proven quiet it stays until it is gone."""
        if peer in self.peers:
            if peer.jobs or self._users(peer.endpoint) == [peer]:
                self._break(peer.endpoint, "disconnected")
            if not peer.jobs:
                self.peers.remove(peer)
        self.lifeline.hang_up(peer.line)

    def begin(self, peer: RemotePeer, job: Job) -> None:
        """Queue a job behind the peer's others."""
        if peer.broken is not None or peer not in self.peers:
            job.operation.end(peer.broken or "the peer is gone")
            return
        if not peer.jobs:
            peer.line.send(_BEGIN)
        peer.jobs.append(job)

    def _users(self, endpoint: str) -> list[RemotePeer]:
        return [peer for peer in self.peers if peer.endpoint == endpoint and peer.broken is None]

    def _break(self, endpoint: str, error: str) -> None:
        """Cut the connection to an endpoint. Operations end when nothing of them can be outstanding."""
        users = self._users(endpoint)
        for peer in users:
            peer.broken = error
        if users and self._library.remove(endpoint):
            for peer in users:
                self._fail(peer)

    def _fail(self, peer: RemotePeer) -> None:
        while peer.jobs:
            peer.jobs.popleft().operation.end(peer.broken)

    def _settle(self, peer: RemotePeer) -> None:
        """End the operations of a broken peer once it is gone and what it sent has been taken in."""
        if peer.gone() and all(job.handle is None or self._library.ended(job.handle) for job in peer.jobs):
            self._take_in()
            self._fail(peer)
            if not peer.connected:
                self.peers.remove(peer)

    def _take_in(self) -> None:
        for _ in range(_DRAIN_TURNS):
            for line, frame in self.lifeline.wait(0):
                self._on_frame(line, frame)
        self._library.take_in()

    def _step(self, peer: RemotePeer) -> bool:
        """Move the peer's first operation on; True when something happened."""
        if not peer.jobs:
            return False
        if peer.broken is not None:
            self._settle(peer)
            return False
        job = peer.jobs[0]
        if job.handle is None and (job.at == job.num_batches or job.operation.flags[0]):
            done = job.at == job.num_batches
            self._end_first(peer, None if done else f"cancelled after {job.at} of {job.num_batches} batches")
            return True
        try:
            if job.handle is None:
                job.handle = self._library.issue(peer, job.direction, job.batch())
            if not self._library.check(job.handle):
                return False
        except BatchFailedError as error:
            self._end_first(peer, str(error))
            return True
        except Exception as error:
            self._break(peer.endpoint, f"{self._library.scheme}: {error}")
            return True
        job.handle = None
        job.at += 1
        return True

    def _end_first(self, peer: RemotePeer, error: str | None) -> None:
        job = peer.jobs.popleft()
        if not peer.jobs:
            peer.line.send(_END)
        job.operation.end(error)

    # ------------------------------------------------------------ the thread: its loop

    def _run(self, started: Future[None]) -> None:
        try:
            self._library.start(self.lifeline, self.bounce)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        pause = _POLL_S[0]
        while not self.stopping:
            try:
                if self._turn():
                    pause = _POLL_S[0]
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, _POLL_S[1])
            except Exception:
                log.exception("the %s transport goes on after an error", self._library.scheme)
                time.sleep(_POLL_S[1])
        self._run_calls()
        for peer in list(self.peers):
            self.remove(peer)
        with contextlib.suppress(Exception):
            self._library.stop()
        if not any(peer.jobs for peer in self.peers):
            self.lifeline.say_bye()
        self.lifeline.close()

    def _turn(self) -> bool:
        """Sleep if there is nothing to do, else do it; False when it should be looked at again soon."""
        jobs = [peer.jobs for peer in self.peers if peer.broken is None and peer.jobs]
        ready = any(job[0].handle is None for job in jobs)
        busy = self._library.polls and (bool(self._announced) or bool(jobs))
        linger = any(peer.jobs for peer in self.peers if peer.broken is not None)
        for line, frame in self.lifeline.wait(0 if ready or busy else _LINGER_S if linger else _IDLE_S):
            self._on_frame(line, frame)
        self._run_calls()
        moved = [self._step(peer) for peer in list(self.peers)]
        self._library.progress()
        return not busy or any(moved)

    def _run_calls(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def _on_frame(self, line: Line, frame: bytes | None) -> None:
        if frame == _BEGIN:
            self._announced[line] = self._announced.get(line, 0) + 1
        elif frame == _END:
            self._announced[line] = self._announced.get(line, 0) - 1
            if self._announced[line] <= 0:
                del self._announced[line]
        elif frame is None or frame == BYE:
            self._announced.pop(line, None)
        else:
            self._library.on_frame(line, frame)
        if frame is None:
            for endpoint in {peer.endpoint for peer in self.peers if peer.line is line}:
                self._break(endpoint, "the peer closed its transport or died")

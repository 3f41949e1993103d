"""The thread that owns a transfer library.

Peers announce over the lifeline when copies start and end, for libraries that need the receiver's help.
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

from baton.errors import BatonError, ConfigError, TransportError
from baton.transports.batches import Job
from baton.transports.remote.library import BatchFailedError, Library, RemotePeer
from baton.transports.remote.lifeline import BYE, RECEIVED_BYTES, Lifeline, Line
from baton.transports.remote.tcp_buffers import held_bytes

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
_POLL_S = (50e-6, 1e-3)  # pauses between polls, doubled while nothing happens
_TURN_S = 1e-3  # how long one peer's copies may keep the thread from others
_LINGER_S = 0.05  # how often to check an operation whose end is not proven yet
IDLE_S = 1.0  # the longest sleep while nothing is copied
_BEGIN, _END, _DRAIN, _DRAINED = b"begin", b"end", b"drain", b"drained"
T = TypeVar("T")


class Driver:
    """Owns a library, its peers, and their thread."""

    def __init__(self, library: Library, host: str) -> None:
        """Raises `ConfigError`."""
        self.lifeline = Lifeline(host)
        self.bounce = np.zeros(64, dtype=np.uint8)
        self.peers: list[RemotePeer] = []
        self._added: set[str] = set()
        self._library = library
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken = False  # the thread will run the calls soon
        self._announced: dict[Line, int] = {}  # announced by peers and not ended
        self.stopping = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"baton-{library.scheme}", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException as error:
            self.lifeline.close()
            if isinstance(error, BatonError) or not isinstance(error, Exception):
                raise
            raise ConfigError("transport", f"{library.scheme} does not start: {error}") from error

    # ------------------------------------------------------------ any thread

    def post(self, action: Callable[[], None]) -> None:
        self._calls.put(action)
        if not self._woken:
            self._woken = True
            self.lifeline.wake()

    def call(self, action: Callable[[], T]) -> T:
        """Run `action` on the driver's thread. Errors other than Baton's become `TransportError`, as does an action
        that takes longer than `CALL_TIMEOUT_S`."""
        if self.stopping:
            raise TransportError(f"the {self._library.scheme} transport is closed")
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
        except Exception as error:  # libraries' exceptions have no common base
            raise TransportError(f"{self._library.scheme}: {error}") from error

    def prove(self, peer: RemotePeer) -> None:
        """Receive what a gone peer had sent, then set its `taken_in`. Nothing arrives after `stop`."""
        if not self._thread.is_alive():
            peer.taken_in = True
        elif not peer.proving:
            peer.proving = True
            self.post(lambda: self._prove(peer))

    def stop(self) -> None:
        """Peers get BYE if no copy of this side is outstanding."""
        self.stopping = True
        self.lifeline.wake()
        self._thread.join()

    # ------------------------------------------------------------ the thread: peers and their jobs

    def add(self, peer: RemotePeer, metadata: bytes) -> None:
        if peer.endpoint not in self._added:
            self._library.add(peer.endpoint, metadata)
            self._added.add(peer.endpoint)
        self.peers.append(peer)

    def remove(self, peer: RemotePeer) -> None:
        """The peer stays, with its line, until its operations have provably ended."""
        if peer in self.peers and peer.broken is None:
            peer.broken = "disconnected"
            self._end_given_up(peer.endpoint)
        if not peer.jobs:
            if peer in self.peers:
                self.peers.remove(peer)
            self.lifeline.hang_up(peer.line)

    def begin(self, peer: RemotePeer, job: Job) -> None:
        if peer.broken is not None or peer not in self.peers:
            job.operation.end(peer.broken or "the peer is gone")
            return
        if not peer.jobs:
            peer.line.send(_BEGIN)
        peer.jobs.append(job)

    def drop_cancelled(self) -> None:
        for peer in self.peers:
            for job in [job for job in peer.jobs if job.handle is None and job.operation.flags[0]]:
                self._end(peer, job, job.left())

    def _users(self, endpoint: str) -> list[RemotePeer]:
        return [peer for peer in self.peers if peer.endpoint == endpoint and peer.broken is None]

    def _break(self, endpoint: str, error: str) -> None:
        """Each operation ends when none of its bytes can be outstanding."""
        for peer in self._users(endpoint):
            peer.broken = error
        self._end_given_up(endpoint)

    def _end_given_up(self, endpoint: str) -> None:
        """End the operations of given-up peers that are provably over. Cut the endpoint's connection if no peer uses it
        and no batch is in flight."""
        peers = [peer for peer in self.peers if peer.endpoint == endpoint and peer.broken is not None]
        for peer in peers:
            for job in [job for job in peer.jobs if self._is_quiet(job)]:
                self._end(peer, job, peer.broken)
            if peer.jobs and peer.gone() and all(self._library.ended(job.handle) for job in peer.jobs):
                self._receive_rest()
                self._fail(peer)
        moving = any(not job.failed for peer in peers for job in peer.jobs)
        if endpoint in self._added and not moving and not self._users(endpoint):
            self._added.remove(endpoint)
            if self._library.remove(endpoint):
                self._cut(peers)
        for peer in peers:
            if peer.jobs and peer.cut and (not peer.line.open() or peer.jobs[0].direction == "read"):
                self._fail(peer)
            if not peer.jobs and not peer.connected:
                self.remove(peer)

    def _cut(self, peers: list[RemotePeer]) -> None:
        for peer in peers:
            peer.cut = True
            if peer.jobs:
                # Bytes sent before the error may still be on their way.
                peer.line.send(_DRAIN)

    def _is_quiet(self, job: Job) -> bool:
        if job.handle is None or job.failed:
            return not job.failed
        try:
            return self._library.check(job.handle)
        except BatchFailedError:
            return True
        except Exception:
            job.failed = True
            return False

    def _fail(self, peer: RemotePeer) -> None:
        while peer.jobs:
            self._end(peer, peer.jobs[0], peer.broken)

    def _receive_rest(self) -> None:
        for _ in range(-(-held_bytes() // RECEIVED_BYTES)):
            for line, frame in self.lifeline.wait(0):
                self._on_frame(line, frame)
        self._library.receive_rest()

    def _prove(self, peer: RemotePeer) -> None:
        try:
            self._receive_rest()
            peer.taken_in = True
        finally:
            peer.proving = False

    def _drain(self, line: Line) -> None:
        """Receive what a peer with a failed connection had sent, then answer."""
        self._receive_rest()
        line.send(_DRAINED)

    def _advance(self, peer: RemotePeer) -> bool:
        """Take steps while they change anything. True if one did."""
        moved, until = False, time.monotonic() + _TURN_S
        while self._step(peer):
            moved = True
            if time.monotonic() >= until:
                break
        return moved

    def _step(self, peer: RemotePeer) -> bool:
        if not peer.jobs:
            return False
        if peer.broken is not None:
            self._end_given_up(peer.endpoint)
            return False
        job = peer.jobs[0]
        if job.handle is None and (job.left() is None or job.operation.flags[0]):
            self._end(peer, job, job.left())
            return True
        try:
            if job.handle is None:
                job.handle = self._library.issue(peer, job.direction, job.batch())
            if not self._library.check(job.handle):
                return False
        except BatchFailedError as error:
            self._end(peer, job, str(error))
            return True
        except Exception as error:
            job.failed = job.handle is not None
            self._break(peer.endpoint, f"{self._library.scheme}: {error}")
            return True
        job.handle = None
        job.at += 1
        return True

    def _end(self, peer: RemotePeer, job: Job, error: str | None) -> None:
        peer.jobs.remove(job)
        if not peer.jobs:
            peer.line.send(_END)
        job.handle = None  # released before the end is visible
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
                if self._iterate():
                    pause = _POLL_S[0]
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, _POLL_S[1])
            except Exception:
                log.exception("the %s transport goes on after an error", self._library.scheme)
                time.sleep(_POLL_S[1])
        self._run_calls()
        for peer in list(self.peers):
            peer.connected = False
            self.remove(peer)
            self.lifeline.hang_up(peer.line)
        quiet = not any(peer.jobs for peer in self.peers)
        with contextlib.suppress(Exception):
            self._library.stop()
        for peer in self.peers:
            for job in [job for job in peer.jobs if self._library.ended(job.handle)]:
                self._end(peer, job, peer.broken)
        if quiet:
            self.lifeline.say_bye()
        self.lifeline.close()

    def _iterate(self) -> bool:
        """False if only polling can show the end of a batch in flight."""
        firsts = [(peer, peer.jobs[0]) for peer in self.peers if peer.jobs]
        ready = any(job.handle is None for _, job in firsts)
        busy = self._library.polls and (bool(self._announced) or any(not job.failed for _, job in firsts))
        linger = any(peer.broken is not None for peer, _ in firsts)
        # `_receive_rest` may have taken the wake of a call that has not run.
        at_once = ready or busy or self._woken
        for line, frame in self.lifeline.wait(0 if at_once else _LINGER_S if linger else IDLE_S):
            self._on_frame(line, frame)
        self._run_calls()
        moved = [self._advance(peer) for peer in list(self.peers)]
        self._library.progress()
        return not busy or any(moved)

    def _run_calls(self) -> None:
        self._woken = False  # before the calls: a later one wakes again
        while not self._calls.empty():
            try:
                self._calls.get_nowait()()
            except Exception:
                log.exception("a call of the %s transport failed", self._library.scheme)

    def _on_frame(self, line: Line, frame: bytes | None) -> None:
        if frame == _BEGIN:
            self._announced[line] = self._announced.get(line, 0) + 1
        elif frame == _END:
            self._announced[line] = self._announced.get(line, 0) - 1
            if self._announced[line] <= 0:
                del self._announced[line]
        elif frame is None or frame == BYE:
            self._announced.pop(line, None)
        elif frame == _DRAIN:
            self.post(lambda: self._drain(line))
        elif frame == _DRAINED:
            for peer in [peer for peer in self.peers if peer.line is line and peer.cut]:
                self._fail(peer)
                self._end_given_up(peer.endpoint)
        else:
            self._library.on_frame(line, frame)
        if frame is None:
            for endpoint in {peer.endpoint for peer in self.peers if peer.line is line and peer.broken is None}:
                self._break(endpoint, "the peer closed its transport or died")

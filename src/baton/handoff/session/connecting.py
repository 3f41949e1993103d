"""Opens and closes the transport's connections in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from baton.clock import Clock
from baton.errors import BatonError, TransportError
from baton.transports.base import Peer, Transport

log = logging.getLogger(__name__)

# Seconds before an unreachable peer is tried again, at first and at most; doubled with each failure.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_REFUSED = 1024


class _Refused(NamedTuple):
    until: float
    pause_s: float
    error: str


class TransportEnds:
    """Not thread-safe; `wake` is called on any thread."""

    def __init__(self, transport: Transport, clock: Clock, wake: Callable[[], None]) -> None:
        self._transport = transport
        self._clock = clock
        self._wake = wake
        self._refused: dict[bytes, _Refused] = {}  # by descriptor
        self._abandoned: list[Future[Peer]] = []
        self._retired: list[Peer] = []

    def begin(self, descriptor: bytes) -> Future[Peer]:
        """Call `result` when the future is done. Fails at once if the descriptor failed recently."""
        last = self._refused.get(descriptor)
        wait_s = 0.0 if last is None else last.until - self._clock.monotonic()
        future: Future[Peer]
        if last is not None and wait_s > 0:
            future = Future()
            future.set_exception(TransportError(f"{last.error} (tried again in {wait_s:.1f} s)"))
            return future
        try:
            future = self._transport.connect(descriptor)
            is_done = future.done()
        except Exception as error:
            future, is_done = Future(), True
            future.set_exception(error)
        if not is_done:
            future.add_done_callback(lambda _: self._wake())
        return future

    def result(self, future: Future[Peer], descriptor: bytes) -> Peer:
        """Raises every failure as a `BatonError`: any other error would leave its attempts without an end."""
        try:
            peer = future.result()
        except BatonError as error:
            self._pause(descriptor, str(error))
            raise
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("a transport's connection failed")
            self._pause(descriptor, str(error))
            raise TransportError(f"cannot connect: {error}") from error
        self._refused.pop(descriptor, None)
        return peer

    def _pause(self, descriptor: bytes, error: str) -> None:
        now, last = self._clock.monotonic(), self._refused.get(descriptor)
        if last is not None and now < last.until:
            return
        self._refused.pop(descriptor, None)
        pause_s = FIRST_PAUSE_S if last is None else min(2 * last.pause_s, LONGEST_PAUSE_S)
        self._refused[descriptor] = _Refused(now + pause_s, pause_s, error)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def abandon(self, future: Future[Peer]) -> None:
        self._abandoned.append(future)

    def poll(self) -> None:
        """Disconnect abandoned connections that were established later."""
        for future in [future for future in self._abandoned if future.done()]:
            self._abandoned.remove(future)
            if future.exception() is None:
                self._transport.disconnect(future.result())

    def retire(self, peer: Peer) -> None:
        self._retired.append(peer)

    def sweep(self, used: list[Peer]) -> None:
        """Disconnect retired peers that are unused or fenced. This stops their remaining copies."""
        for peer in [peer for peer in self._retired if peer.fenced() or not any(peer is other for other in used)]:
            self._retired.remove(peer)
            self._transport.disconnect(peer)

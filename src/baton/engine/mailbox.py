"""Items that other threads post to the engine thread: calls, handoff events, and errors that end the engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from baton.clock import Clock, SystemClock
from baton.errors import BatonError
from baton.handoff.protocol.events import HandoffEvent

Posted = Callable[[], None] | HandoffEvent | BatonError


class Mailbox:
    """The queue of the engine thread, which sleeps here. `post`, `stop` and `busy_s` are thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._posted: deque[tuple[float, Posted]] = deque()
        self._turn_started: float | None = None
        self._wake = threading.Condition()
        self.stopping = False
        self.delay_s = 0.0  # from post to take, of the item that is handled

    def post(self, item: Posted) -> None:
        with self._wake:
            self._posted.append((self.clock.monotonic(), item))
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self.stopping = True
            self._wake.notify()

    def busy_s(self) -> float:
        """Seconds since the current turn began or the oldest item was posted, whichever is more; 0 while idle."""
        since = [self._turn_started]
        with self._wake:
            if self._posted:
                since.append(self._posted[0][0])
        began = [start for start in since if start is not None]
        return self.clock.monotonic() - min(began) if began else 0.0

    def take(self) -> Iterator[Posted]:
        while self._posted:
            with self._wake:  # `busy_s` reads the first
                posted, item = self._posted.popleft()
            self.delay_s = self.clock.monotonic() - posted
            yield item
            self.delay_s = 0.0

    def begin_turn(self) -> None:
        self._turn_started = self.clock.monotonic()

    def end_turn(self) -> None:
        self._turn_started = None

    def sleep(self, may_sleep: Callable[[bool], bool], limit_s: float | None) -> None:
        """Wait for an item, at most `limit_s`, if none is posted and `may_sleep(stopping)`."""
        with self._wake:
            if not self._posted and may_sleep(self.stopping):
                self._wake.wait(limit_s)

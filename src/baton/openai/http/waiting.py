"""The limit on choices that wait for their first token."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from baton.errors import OverloadedError

# A waiting choice holds its prompt's tokens, at most 40 bytes each, and two connections.
MAX_QUEUED_REQUESTS = 1024


# First tokens to estimate from, and bounds in seconds.
_LAST = 32
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60


class QueueSpeed:
    """How fast a queue moves while it is not empty."""

    def __init__(self) -> None:
        self._served: deque[float] = deque(maxlen=_LAST)
        self._idle_s = 0.0

    def resume(self, now: float) -> None:
        """The queue is no longer empty."""
        if self._served:
            self._idle_s = now - self._served[-1]

    def note(self, now: float) -> None:
        self._served.append(now - self._idle_s)

    def seconds_for(self, num: int, now: float) -> int:
        """How long `num` requests will take, 1 to 60 seconds."""
        if len(self._served) < 2:
            return _MIN_RETRY_S
        each = (now - self._idle_s - self._served[0]) / (len(self._served) - 1)
        return max(_MIN_RETRY_S, min(_MAX_RETRY_S, math.ceil(each * num)))


class AdmissionLimit:
    """Counts waiting choices. `limit` None: unlimited. `clock`: monotonic seconds, only for `retry_after_s`."""

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._speed = QueueSpeed()
        self.num_waiting = 0

    def retry_after_s(self) -> int:
        return self._speed.seconds_for(self.num_waiting, self._clock())

    def check(self, num: int = 1) -> None:
        """Raises `OverloadedError` if `num` more exceed the limit. While none waits, any number may enter."""
        if self._limit is not None and self.num_waiting and self.num_waiting + num > self._limit:
            raise OverloadedError(f"{self.num_waiting} requests wait already; try again later", self.retry_after_s())

    def waiting(self, num: int, bounded: bool = True) -> AbstractContextManager[Callable[[], None]]:
        """Call the yielded function for each choice that gets its first token.

        Raises the error of `check` if `bounded`. Resumed choices are not: their clients have tokens.
        """
        if bounded:
            self.check(num)
        return _Waiting(self, num)

    def enter(self, num: int) -> None:
        if not self.num_waiting:
            self._speed.resume(self._clock())
        self.num_waiting += num

    def served(self) -> None:
        self.num_waiting -= 1
        self._speed.note(self._clock())


class _Waiting:
    __slots__ = ("_left", "_limit")

    def __init__(self, limit: AdmissionLimit, num: int) -> None:
        self._limit, self._left = limit, num

    def __enter__(self) -> Callable[[], None]:
        self._limit.enter(self._left)
        return self._served

    def _served(self) -> None:
        self._left -= 1
        self._limit.served()

    def __exit__(self, *error: object) -> None:
        self._limit.num_waiting -= self._left

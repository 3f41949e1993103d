"""The limit on choices that wait for their first token."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from baton.errors import OverloadedError

# A waiting choice holds its prompt's tokens, at most 40 bytes each, and two connections.
MAX_QUEUED_REQUESTS = 1024


# First tokens from which the speed of a queue is estimated, and the bounds of the estimate, in seconds.
_LAST = 32
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60


class AdmissionLimit:
    """Counts waiting choices. `limit` None: unlimited. `clock`: monotonic seconds, only for `retry_after_s`."""

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._served: deque[float] = deque(maxlen=_LAST)
        self.num_waiting = 0

    def retry_after_s(self) -> int:
        """How long those that wait will take at the speed of the last first tokens, 1 to 60 seconds."""
        if len(self._served) < 2:
            return _MIN_RETRY_S
        each = (self._clock() - self._served[0]) / (len(self._served) - 1)
        return max(_MIN_RETRY_S, min(_MAX_RETRY_S, math.ceil(each * self.num_waiting)))

    def check(self, num: int = 1) -> None:
        """Raise `OverloadedError` if `num` more exceed the limit. If none waits, any number is allowed."""
        if self._limit is not None and self.num_waiting and self.num_waiting + num > self._limit:
            raise OverloadedError(f"{self.num_waiting} requests wait already; try again later", self.retry_after_s())

    @contextlib.contextmanager
    def waiting(self, num: int, bounded: bool = True) -> Iterator[Callable[[], None]]:
        """Count `num` choices as waiting. Call the yielded function for each one that gets its first token.

        Raises the error of `check` if `bounded`. Resumed choices are not bounded: their clients already have tokens.
        """
        if bounded:
            self.check(num)
        self.num_waiting += num
        left = num

        def served() -> None:
            nonlocal left
            left -= 1
            self.num_waiting -= 1
            self._served.append(self._clock())

        try:
            yield served
        finally:
            self.num_waiting -= left

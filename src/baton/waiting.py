"""The limit on choices that wait for their first token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from baton.errors import OverloadedError

# A waiting choice holds its prompt's tokens, at most 40 bytes each, and two connections.
MAX_QUEUED_REQUESTS = 1024


class AdmissionLimit:
    """Counts waiting choices. `limit` None: unlimited."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.num_waiting = 0

    def check(self, num: int = 1) -> None:
        """Raise `OverloadedError` if `num` more exceed the limit. If none waits, any number is allowed."""
        if self._limit is not None and self.num_waiting and self.num_waiting + num > self._limit:
            raise OverloadedError(f"{self.num_waiting} requests wait already; try again later")

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

        try:
            yield served
        finally:
            self.num_waiting -= left

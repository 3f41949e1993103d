"""How many choices wait for their first token: beyond a limit new ones are refused, since they would only wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from baton.errors import OverloadedError

# Each holds its prompt's tokens, 40 bytes a token at most, and two connections.
MAX_QUEUED_REQUESTS = 1024


class Queue:
    """Counts those that wait; `limit` None bounds nothing."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.num_waiting = 0

    def check(self, num: int = 1) -> None:
        """Raise `OverloadedError` where `num` more are too many. However many they are, they may wait alone."""
        if self._limit is not None and self.num_waiting and self.num_waiting + num > self._limit:
            raise OverloadedError(f"{self.num_waiting} requests wait already; try again later")

    @contextlib.contextmanager
    def waiting(self, num: int) -> Iterator[Callable[[], None]]:
        """Let `num` wait; what it yields is called when one has its first token. Raises as `check` does."""
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

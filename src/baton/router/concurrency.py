"""A limit on running requests, set by what the engines decode at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

# How often waiting requests look for engines that have joined or recovered.
_LOOK_AGAIN_S = 0.25


class ConcurrencyLimit:
    """Holds requests beyond the engines' `--max-num-seqs` back from their prefill, after which they would stall and
    hold pages of a prefill engine. `capacity`: how many run at once; None: unknown (no engine, or vLLM)."""

    def __init__(self, capacity: Callable[[], int | None]) -> None:
        self._capacity = capacity
        self._waiting: deque[asyncio.Event] = deque()
        self.num_running = 0

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for room, in FIFO order, and occupy it."""
        if self._waiting or not self._has_room():
            await self._turn()
        self.num_running += 1
        self._wake()
        try:
            yield
        finally:
            self.num_running -= 1
            self._wake()

    def _has_room(self) -> bool:
        capacity = self._capacity()
        return capacity is None or self.num_running < capacity

    def _wake(self) -> None:
        if self._waiting and self._has_room():
            self._waiting[0].set()

    async def _turn(self) -> None:
        mine = asyncio.Event()
        self._waiting.append(mine)
        try:
            while self._waiting[0] is not mine or not self._has_room():
                mine.clear()
                # A timer, not a timeout: a client's cancellation must not be taken for an expired timeout.
                timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, mine.set)
                try:
                    await mine.wait()
                finally:
                    timer.cancel()
        except BaseException:
            self._waiting.remove(mine)
            self._wake()
            raise
        self._waiting.popleft()

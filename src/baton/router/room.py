"""How many requests a router's engines decode at once: no more than they take, and the others wait in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

# Engines that join or come back are seen so soon by those who wait.
_LOOK_AGAIN_S = 0.25


class Room:
    """Requests beyond the engines' `--max-num-seqs` wait here, before their prefill begins: begun any sooner they would
    hold a prefill engine's pages, and stand still behind their first token. `capacity`: how many run at once; None
    where an engine does not tell, as vLLM's do not, or none is there."""

    def __init__(self, capacity: Callable[[], int | None]) -> None:
        self._capacity = capacity
        self._waiting: deque[asyncio.Event] = deque()
        self.num_running = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One request's. First come, first served."""
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
        """Wait until it is this request's turn, and there is room."""
        mine = asyncio.Event()
        self._waiting.append(mine)
        try:
            while self._waiting[0] is not mine or not self._has_room():
                mine.clear()
                # A timer, not a timeout: nothing here can take a client that leaves for time that has passed.
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

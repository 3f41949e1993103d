"""The tasks that read the legs of an attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from baton.errors import BatonError
from baton.event_loop import timeout
from baton.openai.backend import Take
from baton.wire import LegRole, TokenChunk

# The first token reaches the client before the decode leg is sent.
_THEN_S = 0.001
# May be sent a `Take`, which then gets the chunks first.
Chunks = AsyncGenerator[TokenChunk, Take | None]
# A leg, or an awaitable that prepares it. None: no leg after all.
LegSource = Chunks | Callable[[], Awaitable[Chunks | None]]
E = TypeVar("E", bound=Exception)
LegItem = tuple[LegRole, TokenChunk | BaseException | None]  # None: the leg has ended


class LegItems:
    """A queue for one reader. `direct` gets the decode leg's chunks while the reader waits for them
    and has read all others.
    """

    __slots__ = ("_items", "_waiter", "direct")

    def __init__(self, direct: Take | None = None) -> None:
        self._items: deque[LegItem] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.direct = direct

    def take(self, chunk: TokenChunk) -> bool:
        waits = self._waiter is not None and not self._waiter.done() and not self._items
        return waits and self.direct is not None and self.direct(chunk)

    def put_nowait(self, item: LegItem) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> LegItem:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class LegWatch:
    """Accompanies one leg. An error of `begin` or `on_chunk` fails it."""

    async def begin(self) -> None:
        """Called before the leg's request is sent."""

    def on_chunk(self, chunk: TokenChunk) -> None: ...
    def on_end(self, error: Exception | None) -> None:
        """Called once, even without `begin`. `error` None: the leg ended well, or was closed."""


class _StartAfterFirstToken(LegWatch):
    """The first chunk or the end of the prefill leg starts the decode leg, which waits at most `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s, self._came = wait_s, asyncio.Event()

    async def wait(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(self._wait_s):
                await self._came.wait()

    def on_chunk(self, chunk: TokenChunk) -> None:
        asyncio.get_running_loop().call_later(_THEN_S, self._came.set)

    def on_end(self, error: Exception | None) -> None:
        self._came.set()


class _SendAfterPrefill(LegWatch):
    """Makes the decode leg wait until the prefill leg's request is sent."""

    def __init__(self, first: _StartAfterFirstToken | None) -> None:
        self._first = first

    async def begin(self) -> None:
        await asyncio.sleep(0)
        if self._first is not None:
            await self._first.wait()


def start_legs(
    legs: Mapping[LegRole, LegSource],
    items: LegItems,
    watches: Mapping[LegRole, Sequence[LegWatch]],
    first_token_wait_s: float | None,
) -> dict[LegRole, asyncio.Task[None]]:
    """The tasks put chunks and ends into `items`."""
    own = {leg: list(watches.get(leg, ())) for leg in legs}
    if len(legs) > 1:
        first = None if first_token_wait_s is None else _StartAfterFirstToken(first_token_wait_s)
        own["prefill"] += [] if first is None else [first]
        if first is not None or not callable(legs["decode"]):
            own["decode"].insert(0, _SendAfterPrefill(first))
    return {leg: asyncio.create_task(_read(leg, source, items, own[leg])) for leg, source in legs.items()}


async def _read(leg: LegRole, source: LegSource, items: LegItems, watches: Sequence[LegWatch]) -> None:
    try:
        error: Exception | None = None
        chunks = None if callable(source) else source
        try:
            for watch in watches:
                await watch.begin()
            if callable(source):
                chunks = await source()
            if chunks is not None:
                take = _taking(items, watches) if leg == "decode" else None
                chunk = await anext(chunks, None)
                while chunk is not None:
                    items.put_nowait((leg, chunk))
                    for watch in watches:
                        watch.on_chunk(chunk)
                    if leg == "prefill":
                        await asyncio.sleep(0)  # the client first
                    try:
                        chunk = await chunks.asend(take)
                    except StopAsyncIteration:
                        break
        except Exception as failed:
            error = failed
            raise
        finally:
            for watch in watches:
                watch.on_end(error)
            error = None  # its traceback holds this frame
            if chunks is not None:
                await chunks.aclose()
        items.put_nowait((leg, None))
    except BatonError as failed:
        items.put_nowait((leg, frameless(failed)))
    except Exception as failed:
        items.put_nowait((leg, failed))


def frameless(error: E) -> E:
    """Frames hold prompts, and often the error itself."""
    error.__traceback__ = error.__context__ = None
    return error


def _taking(items: LegItems, watches: Sequence[LegWatch]) -> Take:
    listening = [watch for watch in watches if type(watch).on_chunk is not LegWatch.on_chunk]
    if not listening:
        return items.take

    def take(chunk: TokenChunk) -> bool:
        if not items.take(chunk):
            return False
        for watch in listening:
            watch.on_chunk(chunk)
        return True

    return take


async def rest_of_leg(which: LegRole, task: asyncio.Task[None], items: LegItems, ended: bool) -> Chunks:
    """Closing the generator closes the leg."""
    try:
        while not ended:
            leg, item = await items.get()
            if leg == which:
                if not isinstance(item, TokenChunk):
                    return
                yield item
    finally:
        await end_task(task)


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task whose error was raised or does not matter, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

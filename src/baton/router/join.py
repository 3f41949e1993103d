"""Two legs, one stream: the prefill leg's first token at once, then the decode leg's tokens.

The decode leg runs from the start, and may answer before the prefill leg does; what it says is kept until
the first token went out. It never repeats that token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from baton.errors import EngineUnavailableError
from baton.wire import TokenChunk

Leg = Literal["prefill", "decode"]
Chunks = AsyncGenerator[TokenChunk, None]
_Item = TokenChunk | BaseException | None  # None: the stream ended


async def join_legs(
    prefill: Chunks, decode: Chunks, drain: Callable[[Chunks], None]
) -> AsyncGenerator[tuple[TokenChunk, Leg], None]:
    """Yield (chunk, leg it came from) until a chunk with `finish_reason`.

    Closing it closes both legs. When the first token is the last, the decode leg is handed to `drain`: its
    engine is told by its peer and ends the leg itself; so is the prefill leg when the decode leg ended well,
    as its engine ends it once its pages are free. Raises what a leg raised; an error of the decode leg
    before the first token is raised at once, because nothing would come after that token.
    """
    items: asyncio.Queue[tuple[Leg, _Item]] = asyncio.Queue()
    tasks: dict[Leg, asyncio.Task[None]] = {
        "prefill": asyncio.create_task(_pump("prefill", prefill, items)),
        "decode": asyncio.create_task(_pump("decode", decode, items)),
    }
    early: list[TokenChunk] = []  # of the decode leg, while the first token is awaited
    seeded = prefill_ended = decode_ended = False
    drained: Leg | None = None
    try:
        while True:
            leg, item = await items.get()
            if isinstance(item, BaseException):
                if leg == "prefill" and seeded:
                    continue  # the decode engine notices by itself whether it misses anything
                raise item
            if leg == "prefill":
                if item is None:
                    if not seeded:
                        raise EngineUnavailableError("the prefill leg ended without a token")
                    prefill_ended = True
                    continue
                seeded = seeded or bool(item.token_ids)
                drained = "decode" if item.finish_reason in ("stop", "length") else None
                yield item, "prefill"
                if item.finish_reason is not None:
                    return
                if seeded:
                    for chunk in early:
                        drained = _ends_well(chunk)
                        yield chunk, "decode"
                        if chunk.finish_reason is not None:
                            return
                    early.clear()
            elif item is None:
                decode_ended = True
            elif seeded or item.finish_reason == "error":
                drained = _ends_well(item)
                yield item, "decode"
                if item.finish_reason is not None:
                    return
            else:
                early.append(item)
            if seeded and decode_ended:
                raise EngineUnavailableError("the decode leg ended before the request did")
    finally:
        if drained is not None:
            ended = prefill_ended if drained == "prefill" else decode_ended
            drain(_rest(drained, tasks[drained], items, ended))
        ending = [task for leg, task in tasks.items() if leg != drained]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


async def _pump(leg: Leg, chunks: Chunks, items: asyncio.Queue[tuple[Leg, _Item]]) -> None:
    try:
        try:
            async for chunk in chunks:
                items.put_nowait((leg, chunk))
        finally:
            await chunks.aclose()
        items.put_nowait((leg, None))
    except Exception as error:
        items.put_nowait((leg, error))


def _ends_well(chunk: TokenChunk) -> Leg | None:
    """Return the leg to drain after this chunk of the decode leg."""
    return "prefill" if chunk.finish_reason in ("stop", "length") else None


async def _rest(which: Leg, task: asyncio.Task[None], items: asyncio.Queue[tuple[Leg, _Item]], ended: bool) -> Chunks:
    """Yield what a leg still says; closing it closes the leg."""
    try:
        while not ended:
            leg, item = await items.get()
            if leg == which:
                if not isinstance(item, TokenChunk):
                    return
                yield item
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

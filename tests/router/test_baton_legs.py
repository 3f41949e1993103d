"""The start of the decode leg if the engines share a host."""

from __future__ import annotations

import asyncio

from baton.errors import EngineLostError
from baton.router.join import Chunks, LegItems, join_legs
from baton.wire import TokenChunk

CHUNK = TokenChunk(request_id="r", token_ids=[1], position=0)
END = TokenChunk(request_id="r", finish_reason="stop")


async def joined(wait_s: float, *, is_long: bool = False, fails: bool = False) -> list[str]:
    """Events in order. A long prefill lasts until the decode leg has sent its token."""
    happened: list[str] = []
    decoded, prefilled = asyncio.Event(), asyncio.Event()
    items: LegItems = asyncio.Queue()
    closing: list[asyncio.Future[None]] = []

    async def prefill() -> Chunks:
        try:
            if is_long:
                await decoded.wait()
            if fails:
                raise EngineLostError("gone")
            yield CHUNK
        finally:
            prefilled.set()

    async def decode() -> Chunks:
        happened.append("decode begins")
        yield CHUNK
        decoded.set()
        await prefilled.wait()
        yield END

    def drain(leg: Chunks) -> None:
        closing.append(asyncio.ensure_future(leg.aclose()))

    legs = join_legs({"prefill": prefill(), "decode": decode()}, items, drain, first_token_wait_s=wait_s)
    async for chunk, leg in legs:
        if chunk.token_ids:
            happened.append(f"{leg} token")
    return happened


async def test_it_begins_after_the_first_token() -> None:
    assert await joined(60.0) == ["prefill token", "decode begins", "decode token"]


async def test_it_does_not_wait_for_a_long_prefill() -> None:
    assert (await joined(0.01, is_long=True))[:2] == ["decode begins", "decode token"]


async def test_it_begins_when_the_prefill_leg_is_lost() -> None:
    """A decode engine may recover alone, or report what it lacks."""
    assert await asyncio.wait_for(joined(60.0, fails=True), 30) == ["decode begins", "decode token"]

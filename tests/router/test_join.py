"""Joining the legs of one request: what becomes of a leg that is lost beside another."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import BatonError, EngineLostError, EngineUnavailableError
from baton.router.join import Chunks, LegItems, join_legs
from baton.wire import TokenChunk


@pytest.mark.parametrize("by_watch", [True, False], ids=["given up by the watch", "its connection broke"])
async def test_a_lost_prefill_leg_is_closed_with_its_request(by_watch: bool) -> None:
    """It is not drained: its engine may be silent for ever."""
    lost: BatonError = EngineLostError("silent")
    closed: list[str] = []
    read = asyncio.Event()
    drained: list[Chunks] = []

    async def prefill() -> Chunks:
        try:
            yield TokenChunk(request_id="r", token_ids=[1], position=0)
            await (asyncio.Event() if by_watch else read).wait()
            raise EngineUnavailableError("broken")
        finally:
            closed.append("prefill")

    async def decode() -> Chunks:
        yield TokenChunk(request_id="r", token_ids=[2], position=1)
        await read.wait()
        yield TokenChunk(request_id="r", token_ids=[3], position=2, finish_reason="stop")

    items: LegItems = asyncio.Queue()
    tokens: list[int] = []
    async for chunk, _ in join_legs({"prefill": prefill(), "decode": decode()}, items, drained.append):
        tokens += chunk.token_ids
        if tokens == [1, 2]:
            if by_watch:
                items.put_nowait(("prefill", lost))
            read.set()
    assert tokens == [1, 2, 3]
    (leg,) = drained
    assert [chunk async for chunk in leg] == []
    assert closed == ["prefill"]

"""The start of the decode leg if the engines share a host."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import EngineUnavailableError
from baton.router.connectors import baton
from baton.router.join import Chunks
from baton.wire import TokenChunk

CHUNK = TokenChunk(request_id="r", token_ids=[1], position=0)


async def begun(prefill_s: float, fails: bool = False) -> tuple[list[str], float]:
    """Events in order, and seconds until the decode leg began."""
    happened: list[str] = []
    loop = asyncio.get_running_loop()
    started = at = loop.time()

    async def prefill() -> Chunks:
        await asyncio.sleep(prefill_s)
        if fails:
            raise EngineUnavailableError("gone")
        yield CHUNK

    async def decode() -> Chunks:
        nonlocal at
        at = loop.time()
        happened.append("decode begins")
        yield CHUNK

    async def read(name: str, chunks: Chunks) -> None:
        async for _ in chunks:
            happened.append(f"{name} token")

    legs = baton._first_token_first(prefill(), decode())
    await asyncio.gather(*(read(role, chunks) for role, chunks in legs.items()), return_exceptions=True)
    return happened, at - started


async def test_it_begins_behind_the_first_token() -> None:
    assert (await begun(0.01))[0] == ["prefill token", "decode begins", "decode token"]


async def test_it_does_not_wait_for_a_long_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton, "FIRST_TOKEN_WAIT_S", 0.01)
    assert (await begun(1.0))[0] == ["decode begins", "decode token", "prefill token"]


async def test_it_begins_when_the_prefill_leg_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine may recover alone, or report what it lacks."""
    monkeypatch.setattr(baton, "FIRST_TOKEN_WAIT_S", 60.0)
    happened, waited = await begun(0.01, fails=True)
    assert happened == ["decode begins", "decode token"]
    assert waited < 30

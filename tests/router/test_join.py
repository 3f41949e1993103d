"""Joining the legs of one request: a leg that is lost beside another, and when the decode leg begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import pytest

from baton.errors import BatonError, EngineLostError, EngineUnavailableError, ProtocolError
from baton.router.attempts.attempt import RunningAttempt
from baton.router.attempts.join import Joined, LegChunks, join_legs
from baton.router.connectors.base import HandoffOutcome
from baton.router.leg_tasks import Chunks, LegItems
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, TokenChunk, TokenLogprobs


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

    items = LegItems()
    tokens: list[int] = []
    async for chunk, _ in join_legs({"prefill": prefill(), "decode": decode()}, items, drained.append):
        tokens += chunk.token_ids
        if tokens == [1, 2]:
            if by_watch:
                items.put_nowait(("prefill", lost))
            read.set()
    assert tokens == [1, 2, 3]
    assert len(drained) == by_watch, "a leg that has ended leaves nothing to drain"
    for leg in drained:
        assert [chunk async for chunk in leg] == []
    assert closed == ["prefill"]


CHUNK = TokenChunk(request_id="r", token_ids=[1], position=0)
END = TokenChunk(request_id="r", finish_reason="stop")


async def joined(wait_s: float, *, is_long: bool = False, fails: bool = False) -> list[str]:
    """Events in order, on one host. A long prefill lasts until the decode leg has sent its token."""
    happened: list[str] = []
    decoded, prefilled = asyncio.Event(), asyncio.Event()
    items = LegItems()
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


async def test_the_decode_leg_begins_after_the_first_token() -> None:
    assert await joined(60.0) == ["prefill token", "decode begins", "decode token"]


async def test_the_decode_leg_does_not_wait_for_a_long_prefill() -> None:
    assert (await joined(0.01, is_long=True))[:2] == ["decode begins", "decode token"]


async def test_the_decode_leg_begins_when_the_prefill_leg_is_lost() -> None:
    """A decode engine may recover alone, or report what it lacks."""
    assert await asyncio.wait_for(joined(60.0, fails=True), 30) == ["decode begins", "decode token"]


@pytest.mark.parametrize("scores", [[], [None], [None] * 3])
def test_logprobs_of_another_number_of_tokens_are_no_answer(scores: list[TokenLogprobs | None]) -> None:
    asked = GenerateRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=SamplingParams(prompt_logprobs=0))
    told = msgspec.structs.replace(CHUNK, prompt_logprobs=[None, TokenLogprobs(-1.0)])
    assert Joined(asked).push(told) is told
    with pytest.raises(ProtocolError, match="logprobs came for a prompt of 2 tokens"):
        Joined(asked).push(msgspec.structs.replace(told, prompt_logprobs=scores))
    with pytest.raises(ProtocolError, match="2 logprobs came with 1 tokens"):
        Joined(asked).push(msgspec.structs.replace(CHUNK, logprobs=[TokenLogprobs(-1.0)] * 2))


async def test_the_first_token_goes_on_before_its_leg_does() -> None:
    steps: list[str] = []

    async def prefill() -> Chunks:
        yield CHUNK
        steps.append("the prefill leg goes on")

    async def decode() -> Chunks | None:
        await asyncio.Event().wait()
        return None

    joined = join_legs({"prefill": prefill(), "decode": decode}, LegItems(), lambda leg: None)
    assert await anext(joined) == (CHUNK, "prefill")
    assert steps == []
    await joined.aclose()


class CountedLeg(AbstractContextManager[Callable[[], None]]):
    """`broken`: the call that raises."""

    def __init__(self, broken: str) -> None:
        self._broken, self.running = broken, False

    def __enter__(self) -> Callable[[], None]:
        if self._broken == "enter":
            raise EngineUnavailableError("enter")
        self.running = True
        return lambda: None

    def __exit__(self, *error: object) -> None:
        self.running = False
        if self._broken == "exit":
            raise EngineUnavailableError("exit")


@pytest.mark.parametrize("broken", ["enter", "exit", "chunks"])
@pytest.mark.parametrize("nth", [0, 1])
async def test_no_leg_stays_counted(broken: str, nth: int) -> None:
    legs = [CountedLeg(broken if i == nth else "") for i in range(2)]

    async def chunks() -> LegChunks:
        try:
            yield CHUNK, "decode"
        finally:
            if broken == "chunks":
                raise EngineUnavailableError("chunks")

    ended: list[HandoffOutcome] = []

    async def run() -> None:
        async with RunningAttempt(chunks(), legs, ended=lambda outcome, error: ended.append(outcome)) as attempt:
            assert await anext(attempt.chunks) == (CHUNK, "decode")
            assert [leg.running for leg in legs] == [True, True]

    with pytest.raises(EngineUnavailableError, match=broken):
        await run()
    assert [leg.running for leg in legs] == [False, False]
    assert ended == ["aborted"]

"""The router and requests whose engines fail: one exact stream, or an error with its reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.error_help import HELP
from baton.errors import (
    BatonError,
    DrainingError,
    EngineLostError,
    EngineStalledError,
    EngineUnavailableError,
    HandoffError,
    ProtocolError,
    RequestError,
)
from baton.event_loop import timeout
from baton.router import RouterConfig, build_app
from baton.router.attempts.join import Joined
from baton.router.attempts.recovery import MAX_ATTEMPTS
from baton.router.clients.engine_client import BatonClient, new_session
from baton.router.index.held import HeldPrefixes
from baton.router.pool import EnginePool
from baton.router.pooled_engine import PooledEngine
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from baton.wire import MAX_WAITED_S, EngineInfo, EngineLoad, GenerateRequest, TokenChunk, TokenLogprobs
from testkit.servers.fake_serving import ADMIN, ADMIN_TOKEN, FakeEngine, await_engines, served, status_of, until
from testkit.servers.fleets import (
    BODY,
    QUICK,
    SILENT,
    Cluster,
    bare,
    complete,
    expected_answer,
    recoveries,
    several_answers,
)


async def num_healthy(session: aiohttp.ClientSession, url: str, num: int) -> None:
    """Wait until so many engines are."""
    while sum(engine["healthy"] for engine in (await status_of(session, url))["engines"]) != num:
        await asyncio.sleep(0.01)


def ids(engine: FakeEngine) -> list[str]:
    return [request.request_id for request in engine.requests]


@pytest.mark.parametrize(("fail", "code"), [("lost", "engine_unavailable"), ("recoverable", "lease_expired")])
async def test_failed_handoffs_are_counted_by_documented_codes(directory: Path, fail: str, code: str) -> None:
    cluster = Cluster(directory)
    cluster.decodes[0].fail = fail
    async with cluster.run() as (url, session):
        series = f'baton:router_handoff_failures_total{{reason="{code}"}}'
        async with session.get(f"{url}/metrics") as response:
            assert f"{series} 0.0\n" in await response.text(), "rate() sees no step of a series that begins with 1"
        assert (await complete(session, url))[0] == 200
        assert (await status_of(session, url))["handoffs"]["failures"] == {code: 1}
        async with session.get(f"{url}/metrics") as response:
            assert f"{series} 1.0\n" in await response.text()
    assert code in HELP


@pytest.mark.parametrize("fail_after", [1, 8, 20])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_lost_decode_engine_costs_no_token(directory: Path, fail_after: int, n: int) -> None:
    cluster = Cluster(directory)
    cluster.decodes[0].fail, cluster.decodes[0].fail_after = "lost", fail_after
    async with cluster.run() as (url, session):
        status, answer = await complete(session, url, n=n)
        assert status == 200, answer
        assert bare(answer) == await expected_answer(directory, session, n=n)
        assert (await recoveries(session, url))["full"] >= 1
        resumed = [r for r in cluster.decodes[1].requests if r.num_prompt_tokens is not None]
        assert resumed
        assert all(r.num_prompt_tokens == 1 for r in resumed)
        everything = ids(cluster.decodes[0]) + ids(cluster.decodes[1])
        assert len(everything) == len(set(everything)), "each attempt has an id of its own"
        transfers = [r.handoff.ticket for r in cluster.decodes[0].requests + cluster.decodes[1].requests if r.handoff]
        assert len(transfers) == len(set(transfers))


@pytest.mark.parametrize("fail", ["lost", "thread died"])
async def test_a_lost_decode_engine_in_a_stream(directory: Path, fail: str) -> None:
    """An engine whose thread died is as lost as one whose process died."""
    cluster = Cluster(directory)
    cluster.decodes[0].fail = fail
    async with cluster.run() as (url, session):
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        expected = await expected_answer(directory, session)
        choices = [choice for event in events for choice in event["choices"]]
        assert [t for c in choices for t in c["token_ids"]] == expected["choices"][0]["token_ids"]
        assert "".join(c["text"] for c in choices) == expected["choices"][0]["text"]
        assert events[-1]["usage"] == expected["usage"]
        offsets = [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]]
        assert offsets == expected["choices"][0]["logprobs"]["text_offset"]


async def test_every_decode_engine_is_lost_once(directory: Path) -> None:
    cluster = Cluster(directory, num_decode=4)
    for number, engine in enumerate(cluster.decodes[:3]):
        engine.fail, engine.fail_after = "lost", 4 + 6 * number
    async with cluster.run() as (url, session):
        _, answer = await complete(session, url)
        assert bare(answer) == await expected_answer(directory, session)


async def test_engines_that_do_both_take_over_from_each_other(directory: Path) -> None:
    cluster = Cluster(directory, 0, 0)
    many = [FakeEngine(directory), FakeEngine(directory)]
    many[0].fail = "lost"
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(cluster.app(engine))) for engine in many]
        app = await build_app(RouterConfig(both=tuple(urls), timers=QUICK))
        url = await stack.enter_async_context(served(app))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        _, answer = await complete(session, url)
        assert bare(answer) == await expected_answer(directory, session)
        assert await recoveries(session, url) == {"full": 1}
        assert len(many[1].requests) == 1
        assert many[1].requests[0].num_prompt_tokens == 1


async def test_no_other_decode_engine_is_an_error_with_its_reason(directory: Path) -> None:
    cluster = Cluster(directory, num_decode=1)
    cluster.decodes[0].fail = "dies"
    async with cluster.run() as (url, session):
        status, answer = await complete(session, url)
        assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
        assert "the engine is down" in answer["error"]["message"]
        assert len(cluster.decodes[0].requests) == 3, "three attempts in a row without a token"
        await until(lambda: cluster.prefills[0].running == cluster.prefills[1].running == 0)


@pytest.mark.parametrize(
    ("recovery", "fault", "recovered"),
    [
        ("recompute", "lost", False),
        ("source", "lost", False),
        ("source", "reports", True),
        ("full", "reports", True),
        ("retry", "reports", False),
        ("retry", "recoverable", False),
        ("source", "recoverable", True),
        ("none", "down", False),
        ("source", "down", True),
    ],
)
async def test_the_ladder_is_climbed_as_far_as_allowed(
    directory: Path, recovery: str, fault: str, recovered: bool
) -> None:
    cluster = Cluster(directory)
    cluster.decodes[0].fail = fault
    async with cluster.run(recovery=recovery) as (url, session):
        status, answer = await complete(session, url)
        if not recovered:
            assert status in (500, 503), answer
            assert await recoveries(session, url) == {}
            return
        assert bare(answer) == await expected_answer(directory, session)
        counted = await recoveries(session, url)
        # If the decode engine took no request, timing decides whether the first token was already out.
        assert counted in ([{"source": 1}, {"retry": 1}] if fault == "down" else [{"source": 1}])
        (rung,) = counted
        async with session.get(f"{url}/metrics") as response:
            assert f'baton:router_recoveries_total{{rung="{rung}"}} 1.0' in await response.text()


async def test_nothing_sent_is_tried_again_where_nothing_more_is_allowed(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.prefills[0].fail = "down"
    async with cluster.run(recovery="retry") as (url, session):
        _, answer = await complete(session, url)
        assert bare(answer) == await expected_answer(directory, session)
        assert await recoveries(session, url) == {"retry": 1}


async def test_a_reported_failure_goes_to_another_prefill_engine(directory: Path) -> None:
    cluster = Cluster(directory, num_decode=1)
    cluster.decodes[0].fail = "recoverable"  # once
    async with cluster.run() as (url, session):
        assert (await complete(session, url))[0] == 200
        assert len(cluster.prefills[0].requests) == len(cluster.prefills[1].requests) == 1


async def test_a_request_that_begins_again_says_how_long_it_waited(directory: Path) -> None:
    """So it keeps its place among those that wait on the prefill engine."""
    cluster = Cluster(directory, num_prefill=1)
    cluster.decodes[0].fail = "down"
    async with cluster.run() as (url, session):
        status, _ = await complete(session, url)
        assert status == 200
    first, again = (request.waited_s for request in cluster.prefills[0].requests)
    assert first == 0.0 < again


async def test_a_prefill_engine_that_is_lost_is_the_decode_engines_matter(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.prefills[0].fail = "lost"
    async with cluster.run() as (url, session):
        asked = asyncio.create_task(complete(session, url))
        await until(lambda: cluster.prefills[0].outcomes["aborted"] == 1 and cluster.decodes[0].running == 1)
        await several_answers(session, url)
        assert cluster.decodes[0].running == 1
        # It recomputes: here, it continues as if everything had been handed over.
        (future,) = cluster.decodes[0].handed.values()
        future.set_result("handed over")
        status, answer = await asked
        assert status == 200
        assert bare(answer) == await expected_answer(directory, session)
        assert await recoveries(session, url) == {}
        assert len(cluster.prefills[1].requests) == 0


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_silent_decode_engine_loses_its_legs_with_its_lease(directory: Path, num_tokens: int) -> None:
    cluster = Cluster(directory)
    for engine in cluster.decodes:
        engine.step_s = 0.05
    if num_tokens == 0:
        cluster.prefills[0].step_s = 1e3  # nothing would ever be handed over
    async with cluster.run(timers=SILENT) as (url, session):
        asked = asyncio.create_task(complete(session, url))
        await until(lambda: cluster.decodes[0].running == 1)
        if num_tokens:
            await asyncio.sleep(0.1)
        # Its late output would not be read, so it makes none.
        cluster.decodes[0].step_s = 1e3
        cluster.stop(cluster.decodes[0])
        cluster.prefills[0].step_s = 0.0
        status, answer = await asked
        assert status == 200, answer
        assert bare(answer) == await expected_answer(directory, session)
        assert len(cluster.decodes[1].requests) == 1
        # Once it answers again, it gets requests again.
        cluster.decodes[0].step_s = 0.0
        cluster.cont(cluster.decodes[0])

        async def healthy() -> bool:
            async with session.get(f"{url}/status") as response:
                return all(engine["healthy"] for engine in (await response.json())["engines"])

        while not await healthy():
            await asyncio.sleep(0.02)
        before = len(cluster.decodes[0].requests)
        for _ in range(2):
            assert (await complete(session, url))[0] == 200
        assert len(cluster.decodes[0].requests) == before + 1


@pytest.mark.parametrize("how", ["remove", "drain"])
async def test_an_engine_that_falls_silent_after_it_was_removed_loses_its_legs(directory: Path, how: str) -> None:
    """However it was removed, it is watched until its last leg has ended."""
    cluster = Cluster(directory)
    for engine in cluster.decodes:
        engine.step_s = 0.05
    async with cluster.run(timers=SILENT, admin_token=ADMIN_TOKEN) as (url, session):
        asked = asyncio.create_task(complete(session, url))
        await until(lambda: cluster.decodes[0].running == 1)
        removed = (await status_of(session, url))["engines"][2]["url"]
        async with session.post(f"{url}/instances/{how}", json={"url": removed}, headers=ADMIN) as response:
            assert response.status == 200
        cluster.decodes[0].step_s = 1e3
        cluster.stop(cluster.decodes[0])
        async with timeout(60):
            status, answer = await asked
        assert status == 200, answer
        assert bare(answer) == await expected_answer(directory, session)
        assert len(cluster.decodes[1].requests) == 1


async def test_a_removed_engine_is_asked_while_it_has_legs(directory: Path) -> None:
    """Also if a request that had begun before continues there after the engine was idle."""
    app = build_engine_app(FakeEngine(directory), Tokenizer.load(directory))
    async with served(app) as url, new_session() as session:
        pool = EnginePool(session, lambda *args: BatonClient(*args[:3]), timers=QUICK)
        engine = await pool.add(url, "both")
        watching = asyncio.create_task(pool.watch())
        pool.remove(url)
        await until(lambda: not pool._checks)

        async def asked() -> bool:
            before = engine.answered
            for _ in range(4):
                await asyncio.sleep(QUICK.check)
            return engine.answered > before

        assert not await asked()
        with engine.leg(lambda error: None):
            await until(lambda: engine in pool._checks)
        await until(lambda: not pool._checks)
        assert not await asked()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_silent_engine_gets_new_requests_only_for_want_of_another(directory: Path) -> None:
    cluster = Cluster(directory)
    async with cluster.run(timers=RouterTimers(check=0.05, answer=0.5, lease=60.0)) as (url, session):
        cluster.stop(cluster.decodes[0])
        await num_healthy(session, url, 3)
        for _ in range(3):
            assert (await complete(session, url))[0] == 200
        assert len(cluster.decodes[0].requests) == 0
        others = [*cluster.prefills, cluster.decodes[1]]
        for engine in others:
            cluster.stop(engine)
        await num_healthy(session, url, 0)
        asked = asyncio.create_task(complete(session, url))
        await several_answers(session, url)
        assert not asked.done(), "it waits for one of them"
        for engine in [*others, cluster.decodes[0]]:
            cluster.cont(engine)
        assert (await asked)[0] == 200


@pytest.mark.parametrize("recovery", ["full", "none"])
async def test_a_request_with_nothing_to_lose_leaves_a_silent_engine_at_once(directory: Path, recovery: str) -> None:
    """It does not wait for the lease to end, if another engine can take the request and recovery is enabled."""

    class Mute(FakeEngine):
        async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            await asyncio.Event().wait()
            yield TokenChunk(request_id=request.request_id)

    cluster, engines = Cluster(directory, 0, 0), [Mute(directory), FakeEngine(directory)]
    timers = RouterTimers(check=0.05, answer=0.5, lease=60.0)
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(cluster.app(engine))) for engine in engines]
        app = await build_app(RouterConfig(both=tuple(urls), timers=timers, recovery=recovery))  # type: ignore[arg-type]
        url = await stack.enter_async_context(served(app))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        asked = asyncio.create_task(complete(session, url))
        await until(lambda: engines[0].running == 1)
        cluster.stop(engines[0])
        if recovery == "none":
            await num_healthy(session, url, 1)
            await several_answers(session, url)
            assert not asked.done()
            asked.cancel()
        else:
            async with timeout(60):
                status, answer = await asked
            assert status == 200, answer
            assert bare(answer) == await expected_answer(directory, session)
            assert await recoveries(session, url) == {"retry": 1}
        cluster.cont(engines[0])


async def test_the_last_attempt_waits_for_a_silent_engine(directory: Path) -> None:
    """Its request would fail, though another engine could take it, and this one may answer again."""
    answers = asyncio.Event()

    class Late(FakeEngine):
        async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            await answers.wait()
            async for chunk in super()._stream(request):
                yield chunk

    cluster, engines = (
        Cluster(directory, 0, 0),
        [*(Late(directory) for _ in range(MAX_ATTEMPTS)), FakeEngine(directory)],
    )
    timers = RouterTimers(check=0.05, answer=0.5, lease=60.0)
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(cluster.app(engine))) for engine in engines]
        app = await build_app(RouterConfig(both=tuple(urls), timers=timers, policy="round_robin"))
        url = await stack.enter_async_context(served(app))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await await_engines(session, url)
        asked = asyncio.create_task(complete(session, url))
        for number, engine in enumerate(engines[:MAX_ATTEMPTS]):
            await until(lambda engine=engine: engine.running == 1)
            cluster.stop(engine)
            await num_healthy(session, url, len(engines) - 1 - number)
        await several_answers(session, url)
        assert not asked.done()
        for engine in engines[:MAX_ATTEMPTS]:
            cluster.cont(engine)
        answers.set()
        async with timeout(60):
            status, answer = await asked
        assert status == 200, answer
        assert not engines[-1].requests


async def test_an_engine_that_was_down_and_is_silent_gets_no_requests(directory: Path) -> None:
    """A killed engine's successor listens while it loads. Requests sent there would wait until its lease ends."""

    class Client:
        has_ranks, url = False, ""
        failure: BatonError | None = None

        def __init__(self, session: object, url: str, *_: object) -> None:
            self.url, self.role = url, "prefill" if url.endswith("1") else "decode"

        async def info(self) -> EngineInfo:
            if self.failure is not None:
                raise self.failure
            return FakeEngine(directory, role=self.role).info

    async with new_session() as session:
        pool = EnginePool(session, Client)  # type: ignore[arg-type]
        engines = [await pool.add("http://h:1", "prefill"), await pool.add("http://h:2", "decode")]

        async def fails(number: int, error: BatonError | None) -> None:
            engines[number].client.failure = error  # type: ignore[attr-defined]
            await pool.refresh(engines[number])

        await fails(1, EngineLostError("silent"))
        assert pool.usable(healthy=False) == [engines[1]], "it may only be busy"
        await fails(1, EngineUnavailableError("refused"))
        await fails(1, EngineLostError("silent: its successor loads"))
        assert engines[1].num_silent == 1, "a single question of the successor"
        await fails(0, EngineLostError("silent: it computes"))
        assert pool.usable(healthy=False) == [engines[0]]
        await fails(1, None)
        await fails(1, EngineLostError("silent"))
        assert pool.usable(healthy=False) == engines
        await fails(0, DrainingError("it leaves"))
        await fails(0, EngineUnavailableError("refused"))
        assert not await pool.has_died(engines[0]), "it has left as announced"


async def test_the_events_of_an_engine_are_read_for_as_long_as_it_is_in_the_pool(directory: Path) -> None:
    """Not for one that is added twice at a time, nor for a removed one that restarts while it has legs."""

    class Client:
        has_ranks, url, incarnation = False, "", "1"

        def __init__(self, session: object, url: str, *_: object) -> None:
            self.url = url

        async def info(self) -> EngineInfo:
            await asyncio.sleep(0)
            info = FakeEngine(directory).info
            return msgspec.structs.replace(info, role="both", kv_events_port=1, incarnation=self.incarnation)

    async with new_session() as session:
        pool = EnginePool(session, Client)  # type: ignore[arg-type]
        added = await asyncio.gather(
            *(pool.add("http://127.0.0.1:9", "both") for _ in range(2)), return_exceptions=True
        )
        engine = added[0]
        assert isinstance(engine, PooledEngine)
        assert isinstance(added[1], RequestError)
        (subscriber,) = pool.readers.subscribers.values()
        assert isinstance(engine.known, HeldPrefixes)
        assert engine.known.index is subscriber.index
        with engine.leg(lambda error: None):
            pool.remove(engine.url)
            engine.client.incarnation = "2"  # type: ignore[attr-defined]
            await pool.refresh(engine)
            assert engine.info is not None
            assert engine.info.incarnation == "2"
            assert not pool.readers.subscribers
        await pool.readers.close()


async def test_a_router_that_was_halted_gives_nobody_up(directory: Path) -> None:
    cluster = Cluster(directory)
    for engine in cluster.decodes:
        engine.step_s = 0.02
    async with cluster.run(timers=SILENT) as (url, session):
        asked = asyncio.create_task(complete(session, url))
        # On either: one that was slow to answer at the start is chosen less.
        await until(lambda: any(engine.running == 1 for engine in cluster.decodes))
        for engine in cluster.prefills + cluster.decodes:
            cluster.stop(engine)
        await asyncio.sleep(0.07)  # questions to all of them are in flight
        time.sleep(2 * SILENT.lease)  # no loop runs: as if this process had been stopped
        for engine in cluster.prefills + cluster.decodes:
            cluster.cont(engine)
        status, answer = await asked
        assert status == 200, answer
        assert await recoveries(session, url) == {}


async def test_engines_that_disagree_are_told_apart_from_an_answer(directory: Path) -> None:
    cluster = Cluster(directory)
    for engine in cluster.decodes:
        engine.fail = "wrong"
    async with cluster.run() as (url, session):
        status, answer = await complete(session, url)
        assert (status, answer["error"]["code"]) == (500, "token_mismatch")


def joined() -> Joined:
    return Joined(GenerateRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=SamplingParams()))


def chunk(position: int | None, *tokens: int, **fields: Any) -> TokenChunk:
    logprobs = [TokenLogprobs(logprob=-float(t)) for t in tokens]
    return TokenChunk(request_id="x", token_ids=list(tokens), position=position, logprobs=logprobs, **fields)


def test_tokens_join_by_position() -> None:
    stream = joined()
    assert stream.push(chunk(0, 5)) == chunk(0, 5)
    assert stream.push(chunk(0, 5)) is None
    assert stream.push(TokenChunk(request_id="x")) is None
    assert stream.push(chunk(0, 5, 6, 7, accepted=[1])) == chunk(1, 6, 7, accepted=[1])
    assert stream.push(chunk(1, 6)) is None
    last = stream.push(chunk(2, 7, accepted=[0], finish_reason="stop", stop_reason=7))
    assert last == TokenChunk(request_id="x", finish_reason="stop", stop_reason=7)
    assert stream.token_ids == [5, 6, 7]


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_time_in_the_queue_is_told_whichever_leg_says_the_first_token(first: str) -> None:
    stream, legs = joined(), [chunk(0, 5, queued_s=0.5), chunk(0, 5)]
    said = [stream.push(leg) for leg in (legs if first == "prefill" else reversed(legs))]
    said.append(stream.push(chunk(1, 6, finish_reason="length")))
    assert {one.queued_s for one in said if one is not None} - {None} == {0.5}


def test_tokens_that_do_not_join_are_refused() -> None:
    stream = joined()
    stream.push(chunk(0, 5, 6))
    for wrong in (chunk(0, 4), chunk(1, 7, 8), chunk(0, 5, 7)):
        with pytest.raises(HandoffError, match="token_mismatch: output token"):
            stream.push(wrong)
    for misplaced in (chunk(3, 1), chunk(None, 1), chunk(-1, 6)):
        with pytest.raises(ProtocolError, match="position 2 is next"):
            stream.push(misplaced)
    assert stream.token_ids == [5, 6]


def test_more_tokens_than_asked_for_are_refused() -> None:
    stream = Joined(GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=2)))
    stream.push(chunk(0, 5))
    with pytest.raises(ProtocolError, match="more tokens"):
        stream.push(chunk(0, 5, 6, 7))
    assert stream.push(chunk(0, 5, 6)) == chunk(1, 6)
    with pytest.raises(ProtocolError, match="more tokens"):
        stream.push(chunk(2, 7))


def test_logprobs_are_of_their_tokens() -> None:
    with pytest.raises(ProtocolError, match="0 logprobs came with 1 tokens"):
        joined().push(TokenChunk(request_id="x", token_ids=[1], position=0, logprobs=[]))


def test_the_rest_of_a_request_counts_from_its_prompt() -> None:
    stream = joined()
    assert stream.rest(0) is stream.request
    stream.push(chunk(0, 5, 6))
    rest = stream.rest(2, 1.5)
    assert (rest.request_id, rest.prompt_token_ids, rest.num_prompt_tokens) == ("r.2", [1, 2, 5, 6], 2)
    assert rest.sampling_params == stream.request.sampling_params
    assert (stream.request.waited_s, rest.waited_s) == (0.0, 1.5)
    assert msgspec.convert(msgspec.to_builtins(stream.rest(2, 1e9)), GenerateRequest).waited_s == MAX_WAITED_S


def test_a_lost_engine_is_an_unavailable_one_to_clients() -> None:
    from baton.openai.http.api_errors import to_api_error

    assert to_api_error(EngineLostError("gone")).status == 503


async def test_a_decode_engine_that_hangs_is_given_up(directory: Path) -> None:
    """Its server answers every question, but its requests never progress."""
    cluster = Cluster(directory)
    hangs = cluster.decodes[0]
    hangs.step_s, whole = 1000.0, hangs.load

    def load() -> EngineLoad:
        if hangs.requests:
            raise EngineStalledError("the engine thread has been at one step for 200 s")
        return whole()

    hangs.load = load  # type: ignore[method-assign]
    async with cluster.run(timers=SILENT) as (url, session):
        status, answer = await asyncio.wait_for(complete(session, url), 60)
        assert status == 200, answer
        assert bare(answer) == await expected_answer(directory, session)
        assert len(hangs.requests) == 1
        assert (await recoveries(session, url))["full"] == 1
        async with session.get(f"{url}/status") as response:
            problems = [engine["problem"] for engine in (await response.json())["engines"]]
        assert [problem is not None and "is stalled" in problem for problem in problems] == [False, False, True, False]

"""What broke other routers in production, each as a test, here or in the files of `TRAPS`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton.errors import EngineUnavailableError
from baton.router import RouterConfig, build_app
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import ADMIN, ADMIN_TOKEN, KEY, FakeEngine, await_engines, served, status_of
from testkit.servers.fleets import Cluster, bare, complete, expected_answer
from testkit.servers.vllm_pair import CONNECTORS, Pair
from tests.router.choice.test_routes import LONG, decisions, holding

TESTS = Path(__file__).parents[1]
TRAPS = {
    "disaggregation is silently off": ("router/test_traps.py", "test_disaggregation_is_never_off_unseen"),
    "the first token waits for the end of P's answer": (
        "router/test_router.py",
        "test_the_first_token_does_not_wait_for_the_handoff",
    ),
    "D alone is sent what P's open breaker refuses": (
        "router/test_traps.py",
        "test_a_lost_prefill_engine_gets_no_lone_decode_legs",
    ),
    "failed is terminal": ("router/test_traps.py", "test_failed_is_not_for_ever"),
    "a restarted engine is known by its address": (
        "router/choice/test_routes.py",
        "test_a_restarted_engine_holds_nothing",
    ),
    "it has other weights": ("router/test_identity.py", "test_a_stream_never_goes_on_with_another_model"),
    "ready is not healthy, and failures are forgotten": (
        "router/test_router.py",
        "test_a_dead_engine_is_avoided_and_the_request_retried",
    ),
    "an address that is not ready is used": (
        "router/choice/test_discovery.py",
        "test_engines_come_and_go_with_their_addresses",
    ),
    "a client leaves in either leg": ("router/test_router.py", "test_client_disconnect_closes_both_legs"),
    "a client leaves before D is asked": (
        "router/vllm/test_vllm_faults.py",
        "test_a_client_that_leaves_while_the_decode_server_is_not_asked_yet",
    ),
    "the end of one leg does not end the other": (
        "router/test_join.py",
        "test_a_lost_prefill_leg_is_closed_with_its_request",
    ),
    "a drain does not count what is in flight": (
        "router/choice/test_routes.py",
        "test_an_engine_is_drained_and_then_gone",
    ),
    "a shutdown waits for prefills, not for transfers": (
        "engine/handoff/test_drain.py",
        "test_a_prefill_leg_ends_when_its_transfer_does_so_that_a_shutdown_waits_for_it",
    ),
    "requests hang while engines join and leave": (
        "router/test_traps.py",
        "test_no_request_hangs_while_engines_come_and_go",
    ),
    "a kept connection is closed": (
        "router/test_traps.py",
        "test_a_kept_connection_that_its_engine_has_just_closed_costs_nothing",
    ),
    "[DONE] in a text, and types of content": (
        "router/test_traps.py",
        "test_the_end_marker_inside_an_answer_ends_nothing",
    ),
    "P's leg has what only the answer needs": (
        "router/test_traps.py",
        "test_a_prefill_leg_has_only_what_its_token_needs",
    ),
    "an error in a stream is no event": (
        "router/vllm/test_vllm_faults.py",
        "test_a_stream_that_began_ends_in_an_error",
    ),
    "the legs have different parts of a chat": ("router/test_traps.py", "test_both_legs_have_the_whole_conversation"),
    "a slot is not given back": (
        "router/choice/test_concurrency.py",
        "test_a_client_that_leaves_as_its_turn_comes_is_cancelled",
    ),
    "queues are not first come, first served": (
        "router/choice/test_concurrency.py",
        "test_first_come_first_served_and_never_more",
    ),
    "dashboards rot": ("router/test_observability_files.py", "test_every_metric_of_the_queries_exists"),
    "prefill engines idle": (
        "router/choice/test_advice.py",
        "test_an_engine_too_many_in_one_role_is_offered_to_the_other",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_has_a_test(trap: str) -> None:
    path, name = TRAPS[trap]
    assert f"def {name}(" in (TESTS / path).read_text()


async def _change(session: Any, router: str, what: str, **body: Any) -> int:
    async with session.post(f"{router}/instances/{what}", json=body, headers=ADMIN) as response:
        return int(response.status)


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded"])
async def test_disaggregation_is_never_off_unseen(directory: Path, policy: str) -> None:
    """A router that takes all for cached hands nothing off. Every request is counted by where it ran, and why."""
    cluster = holding(Cluster(directory))
    async with cluster.run(policy=policy, max_local_prefill_length=40) as (url, session):
        for number in range(6):
            assert (await complete(session, url, prompt=f"{number} {LONG}"))[0] == 200
        assert await decisions(session, url) == {"handed_off": 6}
        summary = (await status_of(session, url))["decisions"]["summary"]
        assert summary == "6 of the last 6 handed off, 0 local"
        assert sum(len(engine.requests) for engine in cluster.prefills) == 6


async def test_a_lost_prefill_engine_gets_no_lone_decode_legs(directory: Path) -> None:
    """A decode leg without its prefill leg would wait for KV that never comes."""
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    lost = cluster.prefills[0]
    lost.fail = "down"
    lost.load = _down  # type: ignore[method-assign]
    async with cluster.run() as (url, session):
        for _ in range(3):
            assert (await complete(session, url))[0] == 200
        roles = [request.handoff and request.handoff.role for request in cluster.decodes[0].requests]
        # The first attempt may have begun both legs before the loss was known.
        assert set(roles[1:]) == {"alone"}
        # A healthy engine is not blamed for its partner.
        assert (await status_of(session, url))["engines"][1]["healthy"]


async def test_failed_is_not_for_ever(directory: Path) -> None:
    """An engine that comes back at its address is asked again, and used."""
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    engine = cluster.decodes[0]
    load = engine.load
    async with cluster.run() as (url, session):
        engine.load = _down  # type: ignore[method-assign]

        async def healthy() -> bool:
            return bool((await status_of(session, url))["engines"][1]["healthy"])

        while await healthy():
            pass
        assert (await complete(session, url))[0] == 200
        assert not engine.requests
        engine.load = load  # type: ignore[method-assign]
        while not await healthy():
            pass
        assert (await complete(session, url))[0] == 200
        assert len(engine.requests) == 1


async def test_no_request_hangs_while_engines_come_and_go(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=2, num_decode=3)
    for engine in cluster.prefills + cluster.decodes:
        engine.step_s = 0.01
    async with cluster.run(admin_token=ADMIN_TOKEN, policy="cache_aware") as (url, session):
        expected = await expected_answer(directory, session)
        decodes = [e["url"] for e in (await status_of(session, url))["engines"] if e["role"] == "decode"]
        ended = asyncio.Event()

        async def churn() -> None:
            while not ended.is_set():
                for engine in decodes[1:]:
                    assert await _change(session, url, "remove", url=engine) == 200
                    await asyncio.sleep(0.02)
                    assert await _change(session, url, "add", url=engine, role="decode") == 200

        changing = asyncio.create_task(churn())
        answers = await asyncio.gather(*(complete(session, url) for _ in range(24)))
        ended.set()
        await changing
        assert {status for status, _ in answers} == {200}
        assert all(bare(answer) == expected for _, answer in answers)
        state = await status_of(session, url)
        assert [engine["num_inflight"] for engine in state["engines"] if engine["role"] == "decode"] == [0, 0, 0]
        assert all(engine["queued_tokens"] == 0 for engine in state["engines"])


async def test_a_kept_connection_that_its_engine_has_just_closed_costs_nothing(directory: Path) -> None:
    """The engine closes each connection after one leg, in the moment in which the router sends the next one there."""
    engine, used, closed = FakeEngine(directory), set[Any](), 0
    app = build_engine_app(engine, Tokenizer.load(directory))

    @web.middleware
    async def close_used(request: web.Request, handler: Any) -> web.StreamResponse:
        nonlocal closed
        if request.method == "POST":
            if request.transport in used:
                closed += 1
                request.transport.abort()
                raise ConnectionResetError
            used.add(request.transport)
        answer: web.StreamResponse = await handler(request)
        return answer

    app.middlewares.append(close_used)
    async with (
        served(app) as e,
        served(await build_app(RouterConfig(both=(e,), ticket_key=KEY))) as url,
        aiohttp.ClientSession() as session,
    ):
        await await_engines(session, url)
        for _ in range(4):
            assert (await complete(session, url))[0] == 200
        (state,) = (await status_of(session, url))["engines"]
        assert state["healthy"]
    assert closed > 0


async def test_the_end_marker_inside_an_answer_ends_nothing(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    text = 'data: [DONE]\n\ndata: {"choices": []}\n\n'
    for engine in cluster.prefills + cluster.decodes:
        engine.tokens = Tokenizer.load(directory).encode(text)
    async with cluster.run() as (url, session):
        body = {"prompt": "a", "max_tokens": len(text), "stream": True, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = [line async for line in response.content if line.strip()]
        assert lines[-1] == b"data: [DONE]\n"
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        assert "".join(event["choices"][0]["text"] for event in events) == text


@pytest.mark.parametrize("name", CONNECTORS)
async def test_a_prefill_leg_has_only_what_its_token_needs(directory: Path, name: str) -> None:
    """Of a stream of two alternatives with usage, which must have five tokens at least."""
    pair = Pair(directory, name)
    asked = {"n": 2, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "max_tokens": 6}
    async with (
        pair.run() as (url, session),
        session.post(f"{url}/v1/completions", json={"prompt": "abc", **asked}) as response,
    ):
        assert response.status == 200
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    assert json.loads(lines[-1][6:])["usage"]["completion_tokens"] == 12
    legs = pair.p.legs("prefill")
    assert len(legs) == 2
    for leg in legs:
        assert (leg["max_tokens"], leg["min_tokens"], leg.get("n", 1)) == (1, 1, 1)
        assert ("stream_options" in leg) == bool(leg.get("stream")), "servers refuse one without the other"


async def test_both_legs_have_the_whole_conversation(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    said = ["be brief", "the first question", "its answer", "the second question"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    asked = {"messages": messages, "max_tokens": 9}
    async with (
        cluster.run() as (url, session),
        session.post(f"{url}/v1/chat/completions", json=asked) as response,
    ):
        assert response.status == 200, await response.text()
    (p,), (d,) = cluster.prefills[0].requests, cluster.decodes[0].requests
    assert p.prompt_token_ids == d.prompt_token_ids
    text = Tokenizer.load(directory).decode(p.prompt_token_ids)
    places = [text.index(each) for each in said]
    assert places == sorted(places)


def _down() -> Any:
    raise EngineUnavailableError("it is gone")

"""What broke other routers in production, each as a test. Elsewhere: first tokens that wait for P, legs of clients that
left (`test_router.py`), drains, lost roles, herds and overload (`choice`).
"""

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
from tests.router.choice.test_routes import LONG, decisions, holding


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


def _down() -> Any:
    raise EngineUnavailableError("it is gone")

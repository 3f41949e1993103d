"""The router over vLLM servers, against a server that speaks as vLLM does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.errors import EngineLostError, EngineUnavailableError, ProtocolError, RequestError
from baton.handoff.ticket import request_digest
from baton.router.client import new_session
from baton.router.timers import RouterTimers
from baton.router.vllm_client import Role, VllmClient
from baton.wire import GenerateRequest, HandoffParams, SamplingParams, TokenChunk, TokenLogprobs

IDENTITY: dict[str, Any] = {
    "engine_id": "P",
    "incarnation": "p1",
    "control_address": "tcp://127.0.0.1:1",
    "fingerprint": "{}",
    "truncate_prefill": False,
    "roles": ["prefill", "decode"],
    "vocab_size": 100,
    "eos_token_ids": [2],
    "num_speculative_tokens": 0,
}


def event(tokens: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish, **more}]}


@dataclass
class FakeVllm:
    """`events` are what it streams; `asked` the bodies that came. `cut`: it dies before the end."""

    events: list[dict[str, Any]] = field(default_factory=lambda: [event([5]), event([6, 7], "length")])
    identity: dict[str, Any] = field(default_factory=lambda: dict(IDENTITY))
    asked: list[dict[str, Any]] = field(default_factory=list)
    healthy: bool = True
    cut: bool = False
    status: int = 200

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo", "root": "/models/demo", "max_model_len": 512}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text='# HELP x\nvllm:num_requests_running{engine="0"} 3.0\nvllm:kv_cache_usage_perc{} 0.5\n'
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no such thing"}}, status=self.status)
        if not body.get("stream"):
            return web.json_response({"choices": [], "kv_transfer_params": {"baton": self.identity}})
        response = web.StreamResponse()
        await response.prepare(request)
        for item in self.events:
            await response.write(b"data: " + json.dumps(item).encode() + b"\n\n")
        if not self.cut:
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_session() as opened:
        yield opened


@pytest.fixture
async def url(server: FakeVllm) -> AsyncIterator[str]:
    async with TestServer(server.app()) as running:
        yield str(running.make_url("")).rstrip("/")


def client(session: aiohttp.ClientSession, url: str, role: Role = "prefill") -> VllmClient:
    return VllmClient(session, url, RouterTimers(), role)


def ask(role: str | None = None, known: int = 0, **params: Any) -> GenerateRequest:
    prompt = [10, 11, 12, 13]
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=prompt,
        num_prompt_tokens=len(prompt) - known if known else None,
        sampling_params=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}),
        handoff=None if role is None else HandoffParams(role=role, ticket="signed"),  # type: ignore[arg-type]
    )


async def chunks(of: VllmClient, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in of.generate(request)]


async def test_who_an_engine_is_is_asked_once_per_life(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    engine = client(session, url)
    info = await engine.info()
    assert (info.engine_id, info.role, info.model, info.model_path, info.max_model_len) == (
        "P",
        "prefill",
        "demo",
        "/models/demo",
        512,
    )
    await engine.info()
    assert len(server.asked) == 1
    assert server.asked[0]["kv_transfer_params"] == {"baton": {"role": "identify"}}
    server.healthy = False
    with pytest.raises(EngineUnavailableError):
        await engine.info()
    server.healthy, server.identity["incarnation"] = True, "p2"
    assert (await engine.info()).incarnation == "p2"


async def test_a_server_without_the_connector_or_the_role(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    server.identity["roles"] = ["decode"]
    with pytest.raises(RequestError, match="roles"):
        await client(session, url).info()
    server.identity = {}
    with pytest.raises(ProtocolError, match="BatonConnector"):
        await client(session, url).info()


async def test_load_comes_from_its_metrics(session: aiohttp.ClientSession, url: str) -> None:
    load = await client(session, url).load()
    assert (load.num_running, load.kv_usage) == (3, 0.5)


async def test_a_decode_leg(server: FakeVllm, session: aiohttp.ClientSession, url: str) -> None:
    request = ask("decode", seed=5, sample_index=2, stop_token_ids=(9,), logprobs=1)
    top = {"token_id:6": -0.1, "token_id:8": -2.0}
    server.events = [event([6], "stop", stop_reason=9, logprobs={"token_logprobs": [-0.1], "top_logprobs": [top]})]
    (chunk,) = await chunks(client(session, url, "decode"), request)
    assert (chunk.token_ids, chunk.position, chunk.finish_reason, chunk.stop_reason) == ([6], 0, "stop", 9)
    assert chunk.logprobs == [TokenLogprobs(-0.1, [(6, -0.1), (8, -2.0)])]
    body = server.asked[-1]
    assert body["prompt"] == request.prompt_token_ids
    assert body["kv_transfer_params"] == {"baton": {"role": "decode", "ticket": "signed"}}
    assert (body["max_tokens"], body["seed"], body["stop_token_ids"], body["logprobs"]) == (8, 7, [9], 1)
    assert "stop" not in body


async def test_a_prefill_leg_ends_without_ending_the_request(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    server.events = [event([5], "length")]
    (chunk,) = await chunks(client(session, url), ask("prefill", min_tokens=3))
    assert (chunk.token_ids, chunk.finish_reason) == ([5], None)
    assert (server.asked[-1]["max_tokens"], server.asked[-1]["min_tokens"]) == (1, 1)
    (chunk,) = await chunks(client(session, url), ask("prefill", max_tokens=1))
    assert chunk.finish_reason == "length"
    server.events = [event([2], "stop")]
    (chunk,) = await chunks(client(session, url), ask("prefill"))
    assert chunk.finish_reason == "stop"


@pytest.mark.parametrize(
    ("identity", "params", "prompt"),
    [
        ({"truncate_prefill": True}, {}, [10, 11, 12]),
        ({"num_speculative_tokens": 3}, {"temperature": 1.0}, [10, 11, 12, 13]),
    ],
)
async def test_a_prefill_leg_whose_token_is_not_the_decode_engines(
    server: FakeVllm,
    session: aiohttp.ClientSession,
    url: str,
    identity: dict[str, Any],
    params: dict[str, Any],
    prompt: list[int],
) -> None:
    server.identity |= identity
    assert await chunks(client(session, url), ask("prefill", **params)) == []
    assert server.asked[-1]["prompt"] == prompt


async def test_a_resumed_request_goes_on_at_its_position(
    server: FakeVllm, session: aiohttp.ClientSession, url: str
) -> None:
    found = await chunks(client(session, url, "decode"), ask("decode", known=2))
    assert [chunk.position for chunk in found] == [2, 3]
    assert server.asked[-1]["max_tokens"] == 6


async def test_failures_are_batons_own(server: FakeVllm, session: aiohttp.ClientSession, url: str) -> None:
    server.cut = True
    with pytest.raises(EngineLostError, match="mid-stream"):
        await chunks(client(session, url), ask())
    server.events = [{"error": {"message": "no memory"}}]
    with pytest.raises(EngineUnavailableError, match="no memory"):
        await chunks(client(session, url), ask())
    engine = client(session, url)
    await engine.info()
    server.status = 400
    with pytest.raises(RequestError, match="no such thing"):
        await chunks(engine, ask())
    server.status = 500
    with pytest.raises(EngineUnavailableError, match="no such thing"):
        await chunks(engine, ask())
    with pytest.raises(EngineUnavailableError):
        await asyncio.wait_for(client(session, "http://127.0.0.1:1").info(), 5)


def test_a_ticket_is_bound_to_what_is_handed_over() -> None:
    engine = VllmClient.__new__(VllmClient)
    expected = request_digest([10, 11, 12], SamplingParams())
    assert engine.digest(ask("decode", seed=3)) == engine.digest(ask("prefill")) == expected

"""The HTTP interface of one engine for routers and for Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.errors import ProtocolError
from baton.openai.http.limits import HttpLimits
from baton.router import RouterConfig
from baton.router.app import build_app as build_router
from baton.server import build_app
from baton.text import Tokenizer
from baton.wire import MAX_TICKET_CHARS, EngineInfo, EngineLoad, TokenChunk
from testkit.servers.fake_serving import FakeEngine, served, until, write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def body(**changes: Any) -> dict[str, Any]:
    return {"request_id": "r", "prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 8}} | changes


async def test_generate_streams_chunks(directory: Path) -> None:
    engine = FakeEngine(directory)
    app = build_app(engine, Tokenizer.load(directory))
    async with served(app) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/inference/v1/generate", json=body()) as response:
            assert response.status == 200
            assert response.content_type == "application/x-ndjson"
            lines = (await response.read()).splitlines()
        chunks = [msgspec.json.decode(line, type=TokenChunk) for line in lines]
        assert [i for c in chunks for i in c.token_ids] == engine.tokens[:8]
        assert chunks[-1].finish_reason == "length"
        async with session.get(f"{url}/inference/v1/info") as response:
            assert msgspec.json.decode(await response.read(), type=EngineInfo) == engine.info
        async with session.get(f"{url}/inference/v1/load") as response:
            assert msgspec.json.decode(await response.read(), type=EngineLoad).num_running == 0
        async with session.get(f"{url}/health") as response:
            assert response.status == 200


async def test_an_engine_takes_so_few_legs_that_a_router_can_ask_it_meanwhile(directory: Path) -> None:
    engine = FakeEngine(directory)
    engine.info = msgspec.structs.replace(engine.info, max_num_seqs=64)
    app = build_app(engine, Tokenizer.load(directory), HttpLimits(connections=10))
    async with served(app) as url, aiohttp.request("GET", f"{url}/inference/v1/info") as response:
        assert msgspec.json.decode(await response.read(), type=EngineInfo).max_num_seqs == 6


async def test_generate_refuses_and_reports(directory: Path) -> None:
    engine = FakeEngine(directory)
    app = build_app(engine, Tokenizer.load(directory))
    async with served(app) as url, aiohttp.ClientSession() as session:
        bad: list[bytes] = [
            b"{",
            json.dumps(body(extra=1)).encode(),
            json.dumps(body(sampling_params={"n": 2})).encode(),
            json.dumps(body(request_id="x" * 257)).encode(),
            json.dumps(body(handoff={"role": "decode", "ticket": "x" * (MAX_TICKET_CHARS + 1)})).encode(),
        ]
        for data in bad:
            async with session.post(f"{url}/inference/v1/generate", data=data) as response:
                assert response.status == 400
                assert "message" in (await response.json())["error"]
        engine.fail = "down"
        async with session.post(f"{url}/inference/v1/generate", json=body()) as response:
            assert response.status == 503
        engine.fail = "mid-stream"
        long = body(sampling_params={"max_tokens": 60})
        async with session.post(f"{url}/inference/v1/generate", json=long) as response:
            last = msgspec.json.decode((await response.read()).splitlines()[-1], type=TokenChunk)
        assert last.finish_reason == "error"
        assert last.error == "internal_error: internal error"


async def test_a_router_that_leaves_aborts_the_request(directory: Path) -> None:
    engine = FakeEngine(directory, step_s=1e3)
    app = build_app(engine, Tokenizer.load(directory))
    async with served(app) as url, aiohttp.ClientSession() as session:
        long = body(sampling_params={"max_tokens": 200})
        async with session.post(f"{url}/inference/v1/generate", json=long) as response:
            await response.content.readline()
        await until(lambda: engine.outcomes["aborted"] == 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_legs_engines_refuse_the_api(directory: Path, role: str) -> None:
    app = build_app(FakeEngine(directory, role=role), Tokenizer.load(directory))
    async with served(app) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 400
            assert f"role is '{role}'" in (await response.json())["error"]["message"]
        async with session.post(f"{url}/inference/v1/generate", json=body()) as response:
            assert response.status == 400


async def test_an_engine_for_clients_serves_no_legs(directory: Path) -> None:
    """Unless its owner declares the port a router's too."""
    engine = FakeEngine(directory)
    engine.info = msgspec.structs.replace(engine.info, token_api=False)
    async with served(build_app(engine, Tokenizer.load(directory))) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/inference/v1/generate", json=body()) as response:
            assert response.status == 404
        async with session.post(f"{url}/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 200
        with pytest.raises(ProtocolError, match="start it with --token-api"):
            await build_router(RouterConfig(both=(url,)))


async def test_requests_without_a_seed_get_the_engines(directory: Path) -> None:
    engine = FakeEngine(directory)
    engine.info = msgspec.structs.replace(engine.info, default_seed=7)
    async with served(build_app(engine, Tokenizer.load(directory))) as url, aiohttp.ClientSession() as session:
        for given, used in (({}, 7), ({"seed": 9}, 9)):
            await session.post(f"{url}/v1/completions", json={"prompt": "a", **given})
            assert engine.requests[-1].sampling_params.seed == used


async def test_an_engine_counts_requests_by_endpoint_and_status(directory: Path) -> None:
    app = build_app(FakeEngine(directory), Tokenizer.load(directory))
    async with served(app) as url, aiohttp.ClientSession() as session:
        await session.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 7})
        await session.post(f"{url}/v1/completions", json={"prompt": ""})
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
    for line in (
        'baton:http_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'baton:http_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        "baton:time_to_first_token_seconds_count 1.0",
        "baton:inter_token_latency_seconds_count 6.0",
        "baton:front_output_tokens_total 7.0",
        'baton:front_spec_accepted_per_pos_total{position="1"} 2.0',
        'baton:fake_steps_total{kind="all"} 3.0',
        "baton:fake_pages 7.0",
    ):
        assert line in text, line

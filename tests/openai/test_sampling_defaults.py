"""The server fills in an engine's sampling defaults only for fields that the client leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.sampling_params import MAX_TOKEN_ID, SamplingDefaults, SamplingParams
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import MAX_MODEL_LEN, FakeEngine, served
from testkit.servers.fleets import Cluster

DEFAULTS = SamplingDefaults(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=0.05,
    presence_penalty=1.5,
    frequency_penalty=0.5,
    repetition_penalty=1.05,
    max_tokens=30,
)
NAMES = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
PLAIN = {name: getattr(SamplingParams(), name) for name in NAMES}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "model": "fake", "max_tokens": 8},
}


def with_defaults(engine: FakeEngine, defaults: SamplingDefaults) -> FakeEngine:
    engine.info = msgspec.structs.replace(engine.info, sampling_defaults=defaults)
    return engine


async def params_of(
    session: aiohttp.ClientSession, url: str, engine: FakeEngine, path: str, **fields: Any
) -> SamplingParams:
    async with session.post(f"{url}{path}", json={**BODIES[path], **fields}) as response:
        assert response.status == 200, await response.text()
    return engine.requests[-1].sampling_params


@pytest.mark.parametrize("path", BODIES)
async def test_the_models_defaults_hold_for_fields_that_a_client_leaves_out(
    directory: Path, session: aiohttp.ClientSession, path: str
) -> None:
    engine = with_defaults(FakeEngine(directory), DEFAULTS)
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        found = await params_of(session, url, engine, path)
        assert {name: getattr(found, name) for name in NAMES} == DEFAULTS.given()
        expected = {"/v1/completions": 16, "/v1/messages": 8}.get(path, 30)
        assert found.max_tokens == expected
        # An explicit value counts, even if it equals the usual default.
        said = {"temperature": 1.0, "top_p": 1.0}
        found = await params_of(session, url, engine, path, **said)
        assert (found.temperature, found.top_p, found.top_k) == (1.0, 1.0, 20)


async def test_all_that_a_client_may_say(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = with_defaults(FakeEngine(directory), DEFAULTS)
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        for value in (PLAIN, {**PLAIN, "top_k": -1}, {**PLAIN, "temperature": 0.0}):
            found = await params_of(session, url, engine, "/v1/chat/completions", **value, max_tokens=40)
            assert {name: getattr(found, name) for name in NAMES} == value
            assert found.max_tokens == 40
        null = dict.fromkeys(NAMES)
        found = await params_of(session, url, engine, "/v1/chat/completions", **null)
        assert {name: getattr(found, name) for name in NAMES} == DEFAULTS.given()


async def test_an_operators_limit_holds_for_all(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = with_defaults(FakeEngine(directory), SamplingDefaults(max_tokens=9, limit=9))
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for fields in ({}, {"max_tokens": 40}):
                assert (await params_of(session, url, engine, path, **fields)).max_tokens == 9
            assert (await params_of(session, url, engine, path, max_tokens=4)).max_tokens == 4


async def test_without_defaults_nothing_changes(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = FakeEngine(directory)
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        found = await params_of(session, url, engine, "/v1/chat/completions")
        assert {name: getattr(found, name) for name in NAMES} == PLAIN
        assert 30 < found.max_tokens < MAX_MODEL_LEN <= MAX_TOKEN_ID


async def test_a_router_fills_in_those_that_its_engines_tell(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    for engine in (*cluster.prefills, *cluster.decodes):
        with_defaults(engine, DEFAULTS)
    async with cluster.run() as (url, session):
        body = {"messages": [{"role": "user", "content": "a"}]}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
        asked = [request.sampling_params for e in (*cluster.prefills, *cluster.decodes) for request in e.requests]
        assert asked
        for params in asked:
            assert {name: getattr(params, name) for name in NAMES} == DEFAULTS.given()
            assert params.max_tokens == 30

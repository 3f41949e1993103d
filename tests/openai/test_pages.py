"""`/ping`, `/load`, `/openapi.json`, `/docs` and the page at `/`, of an engine and of the router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from baton.openai.http.access import Access
from baton.openai.pages import endpoints
from baton.router import RouterConfig
from baton.router import build_app as build_router
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import KEY, FakeEngine, served, until
from tests.openai.test_generic_clients import ASK, Door, doors


@doors
async def test_ping_is_health(directory: Path, door: Door, session: aiohttp.ClientSession) -> None:
    async with door(directory) as (url, _):
        for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/health")):
            async with session.request(method, url + path) as response:
                assert (response.status, await response.read()) == (200, b"")


async def test_ping_and_the_page_where_nothing_can_be_served(directory: Path, session: aiohttp.ClientSession) -> None:
    async with served(await build_router(RouterConfig(decode=("http://127.0.0.1:9",), ticket_key=KEY))) as url:
        assert (await session.get(f"{url}/ping")).status == 503
        assert (await session.get(f"{url}/")).status == 200
    leg = build_app(FakeEngine(directory, role="decode"), Tokenizer.load(directory))  # type: ignore[arg-type]
    async with served(leg) as url:
        assert (await session.get(f"{url}/")).status == 200


async def test_load_counts_what_runs(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = FakeEngine(directory, step_s=0.05)
    async with served(build_app(engine, Tokenizer.load(directory))) as url:  # type: ignore[arg-type]

        async def load() -> Any:
            async with session.get(f"{url}/load") as response:
                return await response.json()

        assert await load() == {"server_load": 0}
        body = {"messages": ASK, "max_tokens": 200}
        asked = [asyncio.create_task(session.post(f"{url}/v1/chat/completions", json=body)) for _ in range(2)]
        await until(lambda: engine.running == 2)
        assert await load() == {"server_load": 2}
        for task in asked:
            task.cancel()
        await until(lambda: engine.running == 0)


@doors
async def test_the_description_is_of_all_routes_and_of_their_bodies(
    directory: Path, door: Door, session: aiohttp.ClientSession
) -> None:
    async with door(directory) as (url, _):
        async with session.get(f"{url}/openapi.json") as response:
            told = await response.json()
        async with session.get(f"{url}/docs") as response:
            page = await response.text()
            assert response.content_type == "text/html"
    assert told["openapi"].startswith("3.1")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        schema = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        whole = {**schema, "components": told["components"]}
        asked: dict[str, Any] = {"model": "m", "messages": ASK, "prompt": "a", "input": "a", "max_tokens": 3}
        jsonschema.validate(asked, whole)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**asked, "model": 7}, whole)
    assert "/v1/models/{name}" in told["paths"]
    for path, methods in told["paths"].items():
        assert all(one["summary"] for one in methods.values()), path
        assert path in page
    # The page loads nothing from other servers.
    assert "src=" not in page
    assert "//" not in page.replace("<!doctype", "")


def test_every_route_says_what_it_is(directory: Path) -> None:
    app = build_app(FakeEngine(directory), Tokenizer.load(directory))  # type: ignore[arg-type]
    assert all(one.summary for one in endpoints(app))


@doors
async def test_the_page_says_what_runs(directory: Path, door: Door, session: aiohttp.ClientSession) -> None:
    async with door(directory) as (url, _), session.get(url) as response:
        text = await response.text()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "<code>fake</code>" in text
    assert f"{url}/v1/chat/completions" in text


async def test_the_page_tells_strangers_no_more_than_they_may_know(
    directory: Path, session: aiohttp.ClientSession
) -> None:
    engine = FakeEngine(directory, model="it's <b>&co")
    app = build_app(engine, Tokenizer.load(directory), access=Access(("secret",)))  # type: ignore[arg-type]
    async with served(app) as url:
        async with session.get(url) as response:
            assert "&amp;co" not in await response.text()
        async with session.get(url, headers={"X-Api-Key": "secret"}) as response:
            text = await response.text()
        async with session.get(url, headers={"Host": 'a"><script>'}) as response:
            assert "<script>" not in await response.text()
    assert "<code>it&#x27;s &lt;b&gt;&amp;co</code>" in text
    assert "<b>" not in text

"""Pages that query all engines: concurrent client requests cause a single query."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from baton.router import RouterConfig, build_app
from baton.router.scrape import Shared
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import KEY, FakeEngine, served, status_of, until
from testkit.servers.fleets import QUICK


@pytest.mark.parametrize(("path", "asked"), [("/metrics", "/metrics"), ("/status", "/inference/v1/load")])
async def test_many_who_ask_at_once_are_one_for_the_engines(directory: Path, path: str, asked: str) -> None:
    paths: list[str] = []
    go_on, num_came = asyncio.Event(), 0

    @web.middleware
    async def count(request: web.Request, handler: object) -> web.StreamResponse:
        nonlocal num_came
        num_came += 1
        assert callable(handler)
        response: web.StreamResponse = await handler(request)
        return response

    @web.middleware
    async def gate(request: web.Request, handler: object) -> web.StreamResponse:
        paths.append(request.path)
        if request.path == asked:
            await go_on.wait()
        assert callable(handler)
        response: web.StreamResponse = await handler(request)
        return response

    engine = build_engine_app(FakeEngine(directory), Tokenizer.load(directory))
    engine.middlewares.append(gate)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = await stack.enter_async_context(served(engine))
        router = await build_app(RouterConfig(both=(url,), ticket_key=KEY))
        router.middlewares.append(count)
        front = await stack.enter_async_context(served(router))

        async def get() -> None:
            async with session.get(front + path) as response:
                assert response.status == 200
                await response.read()

        many = [asyncio.create_task(get()) for _ in range(10)]
        await until(lambda: asked in paths and num_came == len(many))
        go_on.set()
        await asyncio.gather(*many)
        assert paths.count(asked) == 1
        await get()
        assert paths.count(asked) == 2


async def test_a_client_that_leaves_takes_no_answer_from_others() -> None:
    go_on, num = asyncio.Event(), 0

    async def make() -> int:
        nonlocal num
        num += 1
        await go_on.wait()
        if num == 2:
            raise ValueError
        return num

    shared = Shared(make)
    first, second = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert await second == 1
    with pytest.raises(ValueError):
        await shared.get()
    assert await shared.get() == 3


async def test_an_engine_that_was_never_known_and_drains() -> None:
    """Its metrics are shown under its URL: a draining server still answers there."""

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "this server is shutting down", "code": "draining"}}, status=503)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="# TYPE pages gauge\npages 7.0\n")

    app = web.Application()
    app.router.add_get("/inference/v1/info", info)
    app.router.add_get("/metrics", metrics)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        engine = await stack.enter_async_context(served(app))
        config = RouterConfig(both=(engine,), ticket_key=KEY, timers=QUICK)
        url = await stack.enter_async_context(served(await build_app(config)))
        while not (await status_of(session, url))["engines"][0]["draining"]:
            await asyncio.sleep(0.01)
        async with session.get(f"{url}/metrics") as response:
            assert response.status == 200
            assert f'pages{{engine="{engine}",role="both"}} 7.0' in await response.text()

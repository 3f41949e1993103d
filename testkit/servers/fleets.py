"""A router in front of fake engines: one of each role, or two of each role, some of which fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web

from baton.router import RouterConfig, build_app
from baton.router.timers import RouterTimers
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers import fake_serving
from testkit.servers.fake_serving import ADMIN_TOKEN, KEY, FakeEngine, await_engines, served, status_of, until

# Engines and router share one loop, which other tests may block for a while: no engine is silent for that reason.
QUICK = RouterTimers(check=0.05, answer=10.0, lease=30.0, patience=1.0)
# Of tests in which engines fall silent.
SILENT = dataclasses.replace(QUICK, answer=0.5, lease=1.5)
BODY = {"prompt": "a", "max_tokens": 30, "seed": 3, "logprobs": 1, "return_token_ids": True}


@contextlib.asynccontextmanager
async def engines(directory: Path, *many: FakeEngine) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        tokenizer = Tokenizer.load(directory)
        yield [await stack.enter_async_context(served(build_engine_app(e, tokenizer))) for e in many]


class Gate(asyncio.Event):
    """A decode engine's `pause`. Opened once the router has read the first tokens, it gives all others the same way to
    the client, on a busy machine too."""

    num_waiting = 0

    async def wait(self) -> Literal[True]:
        self.num_waiting += 1
        return await super().wait()

    async def open(self, session: aiohttp.ClientSession, url: str, num: int = 1) -> None:
        """`num`: requests that have reached the gate by then."""
        await until(lambda: self.num_waiting >= num)
        await several_answers(session, url)
        self.set()


class Setup:
    """A router in front of a prefill and a decode engine."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        handed: dict[bytes, asyncio.Future[str]] = {}
        self.directory = directory
        self.prefill = FakeEngine(directory, role="prefill", handed=handed, **settings)
        self.decode = FakeEngine(directory, role="decode", handed=handed, **settings)

    @contextlib.asynccontextmanager
    async def run(self, **config: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
        async with engines(self.directory, self.prefill, self.decode) as (p, d):
            self.urls = (p, d)
            app = await build_app(
                RouterConfig(prefill=(p,), decode=(d,), ticket_key=KEY, admin_token=ADMIN_TOKEN, **config)
            )
            async with served(app) as url, aiohttp.ClientSession() as session:
                await await_engines(session, url)
                yield url, session


class Cluster:
    """A router in front of two prefill and two decode engines. `stop` makes an engine silent, as SIGSTOP does."""

    def __init__(self, directory: Path, num_prefill: int = 2, num_decode: int = 2) -> None:
        handed: dict[bytes, asyncio.Future[str]] = {}
        self.directory = directory
        self.prefills = [FakeEngine(directory, role="prefill", handed=handed) for _ in range(num_prefill)]
        self.decodes = [FakeEngine(directory, role="decode", handed=handed) for _ in range(num_decode)]
        self._running: dict[int, asyncio.Event] = {}
        self.apps: dict[FakeEngine, web.Application] = {}
        self.url_of: dict[FakeEngine, str] = {}

    def stop(self, engine: FakeEngine) -> None:
        self._running[id(engine)].clear()

    def cont(self, engine: FakeEngine) -> None:
        self._running[id(engine)].set()

    def app(self, engine: FakeEngine) -> web.Application:
        event = self._running[id(engine)] = asyncio.Event()
        event.set()

        @web.middleware
        async def gate(request: web.Request, handler: Any) -> web.StreamResponse:
            await event.wait()
            try:
                response: web.StreamResponse = await handler(request)
            except ConnectionResetError:
                assert request.transport is not None
                request.transport.abort()  # as if its process died
                raise
            return response

        app = self.apps[engine] = build_engine_app(engine, Tokenizer.load(self.directory))
        app.middlewares.insert(0, gate)
        return app

    @contextlib.asynccontextmanager
    async def run(self, settled: bool = True, **config: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
        """`settled`: the router has heard each engine before the test begins, so that it takes them in their order."""
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(served(self.app(e))) for e in self.prefills + self.decodes]
            self.url_of = dict(zip(self.prefills + self.decodes, urls, strict=True))
            settings = RouterConfig(
                prefill=tuple(urls[: len(self.prefills)]),
                decode=tuple(urls[len(self.prefills) :]),
                ticket_key=KEY,
                **{"timers": QUICK, "policy": "round_robin", **config},
            )
            url = await stack.enter_async_context(served(await build_app(settings)))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            try:
                if settled:
                    await await_engines(session, url)
                yield url, session
            finally:
                for event in self._running.values():
                    event.set()


complete = functools.partial(fake_serving.complete, **BODY)


async def expected_answer(directory: Path, session: aiohttp.ClientSession, **body: Any) -> Any:
    async with served(build_engine_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        status, answer = await complete(session, url, **body)
        assert status == 200
        return bare(answer)


def bare(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


async def recoveries(session: aiohttp.ClientSession, url: str) -> Any:
    return (await status_of(session, url))["recoveries"]


async def several_answers(session: aiohttp.ClientSession, url: str) -> None:
    """The router, on this loop, has had its turn several times."""
    for _ in range(5):
        await status_of(session, url)

"""Queues have limits: a request beyond them is refused with 429 and `Retry-After`; an accepted one never is."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.errors import OverloadedError
from baton.openai.http.waiting import AdmissionLimit
from baton.router import RouterConfig, build_app
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import KEY, TEXT, FakeEngine, served, until


async def complete(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, Any, str | None]:
    async with session.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 6, **body}) as response:
        return response.status, await response.json(), response.headers.get("Retry-After")


class Slow(FakeEngine):
    """Sends nothing until `go` is set."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.go = asyncio.Event()

    async def _stream(self, request: Any) -> Any:
        await self.go.wait()
        async for chunk in super()._stream(request):
            yield chunk


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_refuses_what_is_beyond_its_limit(directory: Path, stream: bool) -> None:
    engine = Slow(directory)
    async with served(build_engine_app(engine, Tokenizer.load(directory))) as e, aiohttp.ClientSession() as session:
        app = await build_app(RouterConfig(both=(e,), max_queued_requests=4))
        async with served(app) as url:
            # A request alone in the queue may have any number of choices.
            waiting = [asyncio.create_task(complete(session, url, n=6))]
            await until(lambda: engine.running == 6)
            for n in (1, 2):
                status, answer, retry_after = await complete(session, url, n=n, stream=stream)
                assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
                assert answer["error"]["code"] == "overloaded"
                assert int(retry_after or 0) >= 1
            waiting[0].cancel()
            await until(lambda: engine.running == 0)

            waiting = [asyncio.create_task(complete(session, url, n=n)) for n in (1, 3)]
            await until(lambda: engine.running == 4)
            assert (await complete(session, url))[0] == 429
            engine.go.set()
            for status, answer, _ in await asyncio.gather(*waiting):
                assert status == 200
                assert answer["choices"][0]["text"] == TEXT[:6]
            assert (await complete(session, url, n=4))[0] == 200, "nothing waits any more"
            assert len(engine.requests) == 6 + 4 + 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_full_engine_is_a_429_unless_another_has_room(directory: Path, role: str) -> None:
    handed: dict[bytes, asyncio.Future[str]] = {}
    many = {r: [Slow(directory, role=r, handed=handed) for _ in range(2)] for r in ("prefill", "decode")}
    engines = [engine for some in many.values() for engine in some]
    for engine in engines:
        engine.go.set()
    tokenizer = Tokenizer.load(directory)
    async with (
        served(build_engine_app(many["prefill"][0], tokenizer)) as p,
        served(build_engine_app(many["prefill"][1], tokenizer)) as p2,
        served(build_engine_app(many["decode"][0], tokenizer)) as d,
        served(build_engine_app(many["decode"][1], tokenizer)) as d2,
        aiohttp.ClientSession() as session,
    ):
        app = await build_app(RouterConfig(prefill=(p, p2), decode=(d, d2), ticket_key=KEY))
        async with served(app) as url:
            many[role][0].fail = "full"
            for _ in range(4):
                status, answer, _ = await complete(session, url)
                assert (status, answer["choices"][0]["text"]) == (200, TEXT[:6])
            many[role][1].fail = "full"
            for engine in engines:
                engine.go.clear()  # a request that already has tokens would be accepted everywhere
            status, answer, retry_after = await complete(session, url)
            assert (status, answer["error"]["code"]) == (429, "overloaded")
            assert retry_after is not None
            async with session.get(f"{url}/status") as response:
                assert all(engine["healthy"] for engine in (await response.json())["engines"])
        await until(lambda: not any(engine.running for engine in engines))


async def test_all_engines_are_asked_before_a_429(directory: Path) -> None:
    """A full engine does not count as a failed attempt."""
    engines = [FakeEngine(directory, fail="full") for _ in range(5)]
    tokenizer = Tokenizer.load(directory)
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(build_engine_app(engine, tokenizer))) for engine in engines]
        url = await stack.enter_async_context(served(await build_app(RouterConfig(both=tuple(urls)))))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        assert (await complete(session, url))[0] == 429
        assert [len(engine.requests) for engine in engines] == [1] * 5
        engines[4].fail = None
        for _ in range(5):
            status, answer, _ = await complete(session, url)
            assert (status, answer["choices"][0]["text"]) == (200, TEXT[:6])


def test_when_to_try_again_follows_from_the_queue() -> None:
    now = [0.0]
    queue = AdmissionLimit(20, lambda: now[0])
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(queue.waiting(20))
        assert queue.retry_after_s() == 1, "nothing is known of its speed yet"
        for _ in range(4):
            served()
            now[0] += 2.0
        with pytest.raises(OverloadedError) as refused:
            queue.check(9)
        # 16 wait, and 8 s have passed since the first of 4: one in 2.67 s.
        assert refused.value.retry_after_s == 43
        now[0] += 1000.0
        assert queue.retry_after_s() == 60
        for _ in range(16):
            served()
        now[0] += 3600.0
        stack.enter_context(queue.waiting(1))
        served()
        now[0] += 3600.0
        stack.enter_context(queue.waiting(1))
        assert queue.retry_after_s() < 60, "an hour in which nobody waited"

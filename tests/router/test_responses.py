"""The Responses API through a router in front of Baton's own engines."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import openai

from baton.router import RouterConfig, build_app
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import KEY, TEXT, FakeEngine, served
from testkit.servers.fleets import QUICK


async def both(url: str, model: str, **more: Any) -> list[str]:
    """The text of an answer, without and with streaming."""
    asked: dict[str, Any] = {"model": model, "input": "abc", "max_output_tokens": 8, **more}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(stream=True, **asked)]
    assert whole.status == "incomplete"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage == whole.usage
    return [whole.output_text, "".join(e.delta for e in events if e.type == "response.output_text.delta")]


async def test_the_responses_api_over_batons_engines(directory: Path) -> None:
    handed: dict[bytes, Any] = {}
    engines = [FakeEngine(directory, role=role, handed=handed) for role in ("prefill", "decode")]
    async with contextlib.AsyncExitStack() as stack:
        apps = [build_engine_app(engine, Tokenizer.load(directory)) for engine in engines]  # type: ignore[arg-type]
        urls = [await stack.enter_async_context(served(app)) for app in apps]
        config = RouterConfig(prefill=(urls[0],), decode=(urls[1],), ticket_key=KEY, timers=QUICK)
        url = await stack.enter_async_context(served(await build_app(config)))
        assert await both(url, "fake") == [TEXT[:8]] * 2
        # The decode engine fails during the stream: the answer ends in a failure that does not contain its address.
        engines[1].fail, engines[1].fail_after = "mid-stream", 3
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="fake", input="abc", stream=True, max_output_tokens=90)
            *_, last = [event async for event in stream]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "http" not in last.response.error.message
    assert all(len(engine.requests) == 3 for engine in engines)

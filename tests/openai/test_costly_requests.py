"""Requests that cost the server much and the client little: the work is bounded before it begins, and never blocks the
event loop.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.openai import FrontMetrics, service
from baton.openai.conversation import MAX_MESSAGES
from baton.router.clients.engine_client import _leg_body
from baton.sampling_params import SamplingParams
from baton.server import build_app
from baton.text import Tokenizer
from baton.wire import GenerateRequest, HandoffParams, PromptIds
from testkit.servers.fake_serving import MAX_MODEL_LEN, FakeEngine, served


async def post(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(f"{url}/v1/{path}", data=io.BytesIO(json.dumps(body).encode())) as response:
        return response.status, await response.json()


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    directory: Path, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    original = Tokenizer.encode

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        texts.append(text)
        return original(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    engine = FakeEngine(directory)
    tokenizer = Tokenizer.load(directory)
    limit = MAX_MODEL_LEN * tokenizer.max_token_chars
    async with served(build_app(engine, tokenizer)) as url:
        long = "a" * (limit + 1)
        for path, body, param in (
            ("completions", {"prompt": long}, "prompt"),
            ("completions", {"prompt": ["a", long]}, "prompt"),
            ("chat/completions", chat(long), "messages"),
        ):
            status, answer = await post(session, url, path, body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert f"at most {limit}" in answer["error"]["message"]
        assert long not in texts
        # A text that might fit is tokenised, and then refused for its tokens.
        status, answer = await post(session, url, "completions", {"prompt": "a" * limit})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert texts[-1] == "a" * limit
    assert engine.requests == []


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_the_event_loop_goes_on_while_a_long_text_is_tokenised(
    directory: Path, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, answered = threading.Event(), threading.Event()

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        begun.set()
        assert answered.wait(60), "nothing else was served meanwhile"
        return [1, 2, 3]

    tokenizer = Tokenizer.load(directory)
    monkeypatch.setattr(Tokenizer, "encode", encode)
    tokenizer.max_token_chars = 1000
    async with served(build_app(FakeEngine(directory), tokenizer)) as url:
        text = "a" * 10_000
        body = {"prompt": text} if path == "completions" else chat(text)
        waiting = asyncio.create_task(post(session, url, path, body))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
        answered.set()
        assert (await waiting)[0] == 200


async def test_bodies_of_clients_that_left_are_not_kept() -> None:
    """Even while the workers are busy with other clients' bodies."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def make_plan(*arguments: Any) -> str:
        begun.release()
        assert go_on.wait(60)
        return "plan"

    class NoBackend:
        def model(self) -> None: ...

    one = service.OpenAIService(NoBackend(), FrontMetrics())  # type: ignore[arg-type]
    asked = [asyncio.create_task(one.plan(b" " * 10_000, make_plan)) for _ in range(10)]
    for _ in range(2):
        assert await asyncio.to_thread(begun.acquire, timeout=60)
    waiting = one._workers._work_queue
    assert waiting.qsize() == 0
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    later = asyncio.create_task(one.plan(b" " * 10_000, make_plan))
    await asyncio.sleep(0)
    assert waiting.qsize() == 0
    go_on.set()
    assert await asyncio.wait_for(later, 60) == "plan"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a" * 100_000}),
        ("completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(2000)}}),
        ("chat/completions", {"messages": [{"role": "nobody"}] * 1000}),
        ("responses", {"input": "a" * 100_000}),
        ("messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * 100_000}]}),
        ("../tokenize", {"prompt": "a" * 100_000}),
        ("../detokenize", {"tokens": [1 << 30] * 3000}),
    ],
)
async def test_a_refused_body_is_freed_without_the_garbage_collector(
    directory: Path, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    """A traceback holds the frames with the body, and a router collects only after thousands of objects."""

    def kept() -> list[str]:
        # Not `isinstance`, which asks a weak proxy's object.
        tracebacks = [one for one in gc.get_objects() if type(one) is TracebackType]
        return [name for one in tracebacks if "/openai/" in (name := one.tb_frame.f_code.co_filename)]

    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        gc.collect()
        gc.disable()
        earlier = kept()
        try:
            assert (await post(session, url, path, body))[0] == 400
            for _ in range(6000):  # the worker's thread may hold it for a moment
                if len(kept()) <= len(earlier):
                    break
                await asyncio.sleep(0.01)
            assert len(kept()) <= len(earlier), kept()
        finally:
            gc.enable()


async def test_requests_beyond_the_bounds_reach_no_engine(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = FakeEngine(directory)
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        for path, body, param in (
            ("completions", {"prompt": "a", "stop": "x" * 1025}, "stop"),
            ("completions", {"prompt": "a", "stop": ["x"] * 17}, "stop"),
            ("completions", {"prompt": "a", "stop_token_ids": [5] * 1_000_000}, "stop_token_ids"),
            ("completions", {"prompt": [1] * 1_000_000}, "prompt"),
            ("completions", {"prompt": "a", "model": "m" * 1_000_000}, "model"),
            ("chat/completions", {"messages": [{"role": "user"}] * (MAX_MESSAGES + 1)}, "messages"),
        ):
            status, answer = await post(session, url, path, body)
            assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)
            assert len(answer["error"]["message"]) <= 2000
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/inference/v1/generate"])
async def test_a_body_of_values_without_end_is_refused_before_it_is_decoded(
    directory: Path, session: aiohttp.ClientSession, path: str
) -> None:
    """16 MiB of empty lists or of fields in a field of any type would block the interpreter for seconds."""
    lists = b"[" + b"[]," * 400_000 + b"1]"
    fields = b"{%b}" % b",".join(b'"%d" : 1' % i for i in range(400_000))
    head = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": '
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        for values in (lists, fields):
            async with session.post(url + path, data=io.BytesIO(head + b'{"a": %b}}' % values)) as response:
                assert response.status == 400
                assert "arrays and objects" in (await response.json())["error"]["message"]
        text = {"prompt": "[:" * 200_000, "max_tokens": 1}
        status, answer = await post(session, url, "completions", text)
        assert status == 400
        assert "arrays" not in answer["error"]["message"], "a text may hold as many"


async def test_legs_are_not_sent_stop_strings(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = FakeEngine(directory)
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        body = {"prompt": "a", "stop": ["quick", "x" * 1000], "n": 4, "max_tokens": 30}
        status, answer = await post(session, url, "completions", body)
        assert status == 200
        assert {choice["stop_reason"] for choice in answer["choices"]} == {"quick"}
        assert {request.sampling_params.stop for request in engine.requests} == {()}
        # An engine refuses a router that sends them.
        leg = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(stop=("x",)))
        async with session.post(f"{url}/inference/v1/generate", data=msgspec.json.encode(leg)) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "stop"


def test_the_legs_of_all_samples_share_their_prompt() -> None:
    prompt = PromptIds(range(1000))
    bodies = []
    for index in range(8):
        handoff = HandoffParams(role="decode", ticket='"prompt_token_ids":[]')
        params = SamplingParams(sample_index=index, logit_bias={5: 1.0})
        request = GenerateRequest(
            request_id='"prompt_token_ids":[7]', prompt_token_ids=prompt, sampling_params=params, handoff=handoff
        )
        bodies.append(_leg_body(request))
        assert msgspec.json.decode(b"".join(bodies[-1]), type=GenerateRequest) == request
    assert len({id(part) for body in bodies for part in body if len(part) > 1000}) == 1
    resumed = GenerateRequest(
        request_id="r", prompt_token_ids=[*prompt, 1], sampling_params=SamplingParams(), num_prompt_tokens=1000
    )
    assert msgspec.json.decode(b"".join(_leg_body(resumed)), type=GenerateRequest) == resumed

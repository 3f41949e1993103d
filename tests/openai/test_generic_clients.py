"""Requests of generic clients, answered as by vLLM: load generators, agents, SDKs with their defaults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from baton.openai.backend import ServedModel
from baton.openai.plan import make_chat_plan
from baton.openai.tools import CalledFunction, Parsing, ToolCall
from baton.parsing import Content, Reasoning
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import MAX_MODEL_LEN, TEXT, FakeEngine, served
from testkit.servers.fleets import Setup
from tests.openai.test_tools import TOOLS

PARSING = Parsing(True, "hermes", None)
ASK: list[Any] = [{"role": "user", "content": "a"}]
Door = Callable[[Path], contextlib.AbstractAsyncContextManager[tuple[str, FakeEngine]]]


@contextlib.asynccontextmanager
async def engine_alone(directory: Path) -> AsyncIterator[tuple[str, FakeEngine]]:
    engine = FakeEngine(directory)
    app = build_app(engine, Tokenizer.load(directory), parsing=PARSING)  # type: ignore[arg-type]
    async with served(app) as url:
        yield url, engine


@contextlib.asynccontextmanager
async def router(directory: Path) -> AsyncIterator[tuple[str, FakeEngine]]:
    """The router over a prefill and a decode engine; yields the decode engine for inspection."""
    setup = Setup(directory)
    async with setup.run(parsing=PARSING) as (url, _):
        yield url, setup.decode


doors = pytest.mark.parametrize("door", [engine_alone, router])


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@doors
@pytest.mark.parametrize("chat", [False, True])
async def test_each_event_has_the_usage_so_far(directory: Path, door: Door, chat: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with door(directory) as (url, _), client_of(url) as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 11, "stream": True, "stream_options": options}
        if chat:
            stream = await client.chat.completions.create(messages=ASK, **asked)
        else:
            stream = await client.completions.create(prompt="Say:", **asked)
        *events, last = [event async for event in stream]
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(set(counts))
    assert counts[-1] == last.usage.completion_tokens == 11
    assert len(counts) > 2
    assert {event.usage.prompt_tokens for event in events} == {last.usage.prompt_tokens}
    totals = [event.usage.total_tokens - event.usage.prompt_tokens for event in events]
    assert totals == counts
    assert last.choices == []


async def test_usage_so_far_is_of_a_choice_and_only_beside_the_whole_one(directory: Path) -> None:
    async with engine_alone(directory) as (url, _), client_of(url) as client:
        asked: dict[str, Any] = {"model": "fake", "prompt": ["a", "bcd"], "n": 2, "max_tokens": 5, "stream": True}
        both: Any = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = [e async for e in await client.completions.create(**asked, stream_options=both)]
        found = {e.choices[0].index: (e.usage.prompt_tokens, e.usage.completion_tokens) for e in events}
        assert found == {0: (1, 5), 1: (1, 5), 2: (3, 5), 3: (3, 5)}
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 20)
        alone: Any = {"continuous_usage_stats": True}
        events = [e async for e in await client.completions.create(**asked, stream_options=alone)]
        assert all(e.usage is None for e in events)


@doors
async def test_seeds_mean_what_they_do_in_vllm(directory: Path, door: Door) -> None:
    """-1 is a new seed each time; others may be negative."""
    async with door(directory) as (url, engine), client_of(url) as client:
        for seed in (-1, -1, None, -7, 7):
            await client.completions.create(model="fake", prompt="a", max_tokens=4, seed=seed)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="fake", prompt="a", max_tokens=4, seed=-(2**63) - 1)
    assert refused.value.param == "seed"
    seeds = [request.sampling_params.seed for request in engine.requests]
    assert len(set(seeds)) == 5
    assert seeds[3:] == [2**64 - 7, 7]


@doors
async def test_a_forced_call_goes_before_a_format(directory: Path, door: Door) -> None:
    """instructor sends both; as in vLLM the call takes precedence."""
    async with door(directory) as (url, engine), client_of(url) as client:
        for choice in ("required", {"type": "function", "function": {"name": "stop"}}):
            asked: dict[str, Any] = {"model": "fake", "messages": ASK, "tools": TOOLS[1:], "tool_choice": choice}
            for more in (
                {"response_format": {"type": "json_object"}},
                {"extra_body": {"structured_outputs": {"regex": "a"}}},
            ):
                await client.chat.completions.create(**asked, max_tokens=4)
                await client.chat.completions.create(**asked, **more, max_tokens=4)
    grammars = [request.sampling_params.structured_outputs for request in engine.requests]
    assert len(grammars) == 8
    for plain, both in zip(grammars[::2], grammars[1::2], strict=True):
        assert plain is not None
        assert plain.json is not None
        assert plain == both


@doors
async def test_responses_by_the_defaults_of_sdks(directory: Path, door: Door) -> None:
    async with door(directory) as (url, engine), client_of(url) as client:
        told = await client.responses.create(
            model="fake", input="a", store=True, truncation="auto", reasoning={"effort": "high"}, max_output_tokens=4
        )
        assert (told.store, told.truncation, told.output_text) == (False, "auto", TEXT[:4])
        assert told.reasoning is not None
        assert told.reasoning.effort == "high"
        long: list[Any] = [{"role": "user", "content": "b" * 200}, {"role": "user", "content": "c" * 100}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="fake", input=long, max_output_tokens=9)
        assert refused.value.param == "input"
        await client.responses.create(model="fake", input=long, max_output_tokens=9, truncation="auto")
    prompt = Tokenizer.load(directory).decode(engine.requests[-1].prompt_token_ids[: MAX_MODEL_LEN - 9])
    assert prompt.endswith("\n<user>" + "c" * 100 + "\n<assistant>")


@doors
async def test_hints_that_change_no_answer(directory: Path, door: Door) -> None:
    async with door(directory) as (url, _), client_of(url) as client:
        hints = {"priority": -3, "best_of": 4}
        told = await client.completions.create(model="fake", prompt="a", max_tokens=4, extra_body=hints)
        assert [choice.text for choice in told.choices] == [TEXT[:4]]
        chat = await client.chat.completions.create(
            model="fake", messages=ASK, max_tokens=4, reasoning_effort="high", extra_body={"priority": 5}
        )
        assert chat.choices[0].message.content == TEXT[:4]


@doors
async def test_models_say_where_they_come_from_and_since_when(directory: Path, door: Door) -> None:
    began = int(time.time())
    async with door(directory) as (url, _), client_of(url) as client:
        (model,) = (await client.models.list()).data
        assert model.root == str(directory)  # type: ignore[attr-defined]
        assert began <= model.created <= int(time.time())
        assert (await client.models.retrieve("fake")) == model


@doors
async def test_bench_serve_needs_no_tokenizer_beside_the_servers_own(directory: Path, door: Door) -> None:
    async with door(directory) as (url, _):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton.cli", "bench", "serve", "--base-url", url, "--num-prompts", "2", "--json"),
            *("--random-input-len", "8", "--random-output-len", "4"),
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await process.communicate()
    assert process.returncode == 0
    figures = json.loads(told)
    assert (figures["completed"], figures["tokenizer_id"]) == (2, str(directory))


async def test_a_refusal_before_a_stream_sets_the_status(directory: Path) -> None:
    async with engine_alone(directory) as (url, _), aiohttp.ClientSession() as session:
        body = {"prompt": "a", "stream_options": {"continuous_usage_stats": True}}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 400


@doors
@pytest.mark.parametrize("arguments", ['{"city": ', '["a"]', "5", "", "null", '{"a": 1} {"b": 2}'])
async def test_a_history_with_a_malformed_call_goes_on(directory: Path, door: Door, arguments: str) -> None:
    """Clients send a truncated call again with each later turn."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "stop", "arguments": arguments}}
    messages: list[Any] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "not run"},
    ]
    items: list[Any] = [
        *ASK,
        {"type": "function_call", "call_id": "abcdefghi", "name": "stop", "arguments": arguments},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "not run"},
    ]
    async with door(directory) as (url, _), client_of(url) as client:
        chat = await client.chat.completions.create(model="fake", messages=messages, max_tokens=4)
        assert chat.choices[0].message.content == TEXT[:4]
        assert (await client.responses.create(model="fake", input=items, max_output_tokens=4)).output_text == TEXT[:4]


def test_malformed_arguments_are_an_empty_object_to_the_template() -> None:
    call = ToolCall(function=CalledFunction(name="f", arguments='{"b": 1, "a": null}'))
    assert list(call.for_template()["function"]["arguments"].items()) == [("b", 1), ("a", None)]


@pytest.mark.parametrize("arguments", ['{"city": ', '["a"]', "5", "null", "\ud800"])
def test_arguments_that_are_no_object_are_an_empty_one_to_the_template(arguments: str) -> None:
    call = ToolCall(function=CalledFunction(name="f", arguments=arguments))
    assert call.for_template()["function"]["arguments"] == {}


@doors
async def test_numbers_of_other_languages(directory: Path, door: Door) -> None:
    """As in vLLM, whose fields accept values that can be converted to their type."""
    async with door(directory) as (url, engine), aiohttp.ClientSession() as session:
        body = {
            "model": "fake",
            "messages": ASK,
            "max_tokens": 4.0,
            "n": "1",
            "top_k": 5.0,
            "temperature": "0.5",
            "stream": "false",
        }
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == TEXT[:4]
        params = engine.requests[-1].sampling_params
        assert (params.max_tokens, params.top_k, params.temperature) == (4, 5, 0.5)
        for name, value in (("max_tokens", 4.5), ("n", "one"), ("stream", "perhaps"), ("temperature", "warm")):
            async with session.post(f"{url}/v1/chat/completions", json={**body, name: value}) as response:
                assert (response.status, (await response.json())["error"]["param"]) == (400, name)


CALL: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "no words": [{"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
    "null for words": [{"role": "assistant", "content": None}, {"role": "user", "content": "b"}],
    "calls without words": [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "calls without content": [{"role": "assistant", "tool_calls": [CALL]}],
    "empty calls": [{"role": "assistant", "content": "b", "tool_calls": []}],
    "a client's whole message": [
        {"role": "assistant", "content": "b", "refusal": None, "function_call": None, "audio": None, "annotations": []}
    ],
    "a name": [{"role": "user", "name": "bob", "content": "b"}],
    "parts of a result": [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "21"}]},
    ],
}


@pytest.mark.parametrize("history", HISTORIES)
async def test_histories_as_clients_keep_them(directory: Path, history: str) -> None:
    async with engine_alone(directory) as (url, _), aiohttp.ClientSession() as session:
        body = {"model": "fake", "messages": [*ASK, *HISTORIES[history]], "max_tokens": 4}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("begun", "thinks"),
    [
        ("<think>One", True),
        ([{"type": "text", "text": "<think>"}, {"type": "text", "text": "One"}], True),
        ("<think>One</think>Two", False),
        ("One", False),
    ],
)
def test_a_continued_message_may_end_within_its_reasoning(directory: Path, begun: Any, thinks: bool) -> None:
    model = ServedModel("fake", Tokenizer.load(directory), 256, 258, 0)
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": begun}]
    body: dict[str, Any] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plan = make_chat_plan(json.dumps(body).encode(), model, Parsing(reasoning_parser="qwen3"))
    assert plan.reader is not None
    parser = plan.reader()
    events = parser.push("more</think>Yes") + parser.finish()
    assert events == ([Reasoning("more"), Content("Yes")] if thinks else [Content("more</think>Yes")])


def test_a_json_object_may_have_a_schema_beside_it(directory: Path) -> None:
    """As llama.cpp's clients send it."""
    model = ServedModel("fake", Tokenizer.load(directory), 256, 258, 0)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {"messages": ASK, "response_format": {"type": "json_object", "schema": schema}}
    plan = make_chat_plan(json.dumps(body).encode(), model)
    grammar = plan.requests[0].sampling_params.structured_outputs
    assert grammar is not None
    assert json.loads(grammar.json or "") == schema
    assert plan.grammar_field == "response_format.schema"

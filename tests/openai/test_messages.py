"""Anthropic's Messages API: conversion of requests, answers (streamed or not), and errors in its format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.openai.http.access import Access
from baton.openai.tools import Parsing
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served, write_tokenizer
from testkit.servers.fleets import Setup
from tests.openai.test_tools import TEMPLATE

PARSING = Parsing(True, "hermes", "qwen3")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER},
    {"name": "stop", "input_schema": {}},
]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
ANSWER = f'<think>Hm.</think>I look.\n{CALL}\n<tool_call>{{"name": "stop", "arguments": {{}}}}</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
Door = Callable[[Path, str], contextlib.AbstractAsyncContextManager[tuple[str, FakeEngine]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tokenizer(tmp_path_factory.mktemp("messages"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def say(engine: FakeEngine, directory: Path, text: str) -> None:
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4096)
    engine.tokens = list(Tokenizer.load(directory).encode(text, False))
    engine.length = len(engine.tokens) + 1


@contextlib.asynccontextmanager
async def engine_alone(directory: Path, text: str) -> AsyncIterator[tuple[str, FakeEngine]]:
    engine = FakeEngine(directory)
    say(engine, directory, text)
    async with served(build_app(engine, Tokenizer.load(directory), parsing=PARSING)) as url:  # type: ignore[arg-type]
        yield url, engine


@contextlib.asynccontextmanager
async def router(directory: Path, text: str) -> AsyncIterator[tuple[str, FakeEngine]]:
    setup = Setup(directory)
    for engine in (setup.prefill, setup.decode):
        say(engine, directory, text)
    async with setup.run(parsing=PARSING) as (url, _):
        yield url, setup.decode


doors = pytest.mark.parametrize("door", [engine_alone, router])


async def post(url: str, path: str = "", **body: Any) -> tuple[int, Any]:
    asked = {"model": "fake", "max_tokens": 900, "messages": ASK, **body}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/messages{path}", json=asked) as response:
        return response.status, await response.json()


async def stream(url: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each with its own name."""
    asked = {"model": "fake", "max_tokens": 900, "messages": ASK, "stream": True, **body}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/messages", json=asked) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        return events_of(await response.text())


def events_of(text: str) -> list[dict[str, Any]]:
    """Parse server-sent events; each event's name must equal its type."""
    events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble the message from events, as Anthropic's clients do."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert (events[0]["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    texts: list[str] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
            continue
        block = message["content"][-1]
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(texts[-1] or "{}")
            continue
        delta = event["delta"]
        kind = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(delta["type"])
        if kind is None:
            assert delta["type"] == "input_json_delta"
            texts[-1] += delta["partial_json"]
        else:
            block[kind] += delta[kind]
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message without fields that differ from answer to answer."""
    blocks = [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


@doors
async def test_thinking_words_and_calls_whole_and_streamed(model: Path, door: Door) -> None:
    async with door(model, ANSWER) as (url, _):
        status, whole = await post(url, tools=TOOLS)
        events = await stream(url, tools=TOOLS)
    assert status == 200
    assert plain(joined(events)) == plain(whole)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "fake")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    thought, words, weather, stop = whole["content"]
    assert (thought["type"], thought["thinking"], bool(thought["signature"])) == ("thinking", "Hm.", True)
    assert words == {"type": "text", "text": "I look.\n"}
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "Bern"})
    assert (stop["name"], stop["input"], stop["id"] != weather["id"]) == ("stop", {}, True)
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 100
    assert usage["output_tokens"] == len(ANSWER) + 1
    pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert len(pieces) > 4, "arguments come in pieces"


@doors
async def test_why_an_answer_ends(model: Path, door: Door) -> None:
    async with door(model, "One. Two.") as (url, engine):
        for body, reason, text in (
            ({}, ("end_turn", None), "One. Two."),
            ({"max_tokens": 5}, ("max_tokens", None), "One. "),
            ({"stop_sequences": ["x", " T"]}, ("stop_sequence", " T"), "One."),
            ({"stop_sequences": ["One"]}, ("stop_sequence", "One"), ""),
        ):
            _, whole = await post(url, **body)
            assert (whole["stop_reason"], whole["stop_sequence"]) == reason
            assert whole["content"] == [{"type": "text", "text": text}]
            assert plain(joined(await stream(url, **body))) == plain(whole)
        await post(url, temperature=0.5, top_p=0.25, top_k=7, cache_salt="s")
    request = engine.requests[-1]
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, request.cache_salt) == (0.5, 0.25, 7, "s")


async def test_a_call_that_is_cut_off_is_told_as_such(model: Path) -> None:
    async with engine_alone(model, CALL) as (url, _):
        for body, reason in (({"max_tokens": 60}, "max_tokens"), ({"stop_sequences": ["Ber"]}, "stop_sequence")):
            _, whole = await post(url, tools=TOOLS, **body)
            assert whole["stop_reason"] == reason
            assert [(block["name"], block["input"]) for block in whole["content"]] == [("get_weather", {})]


async def test_tools_that_must_be_used(model: Path) -> None:
    async with engine_alone(model, '{"city": "Bern"}') as (url, engine):
        _, whole = await post(url, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"})
        assert (whole["stop_reason"], whole["content"][0]["input"]) == ("tool_use", {"city": "Bern"})
        await post(url, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        _, none = await post(url, tools=TOOLS, tool_choice={"type": "none"})
        assert none["content"] == [{"type": "text", "text": '{"city": "Bern"}'}]
        form = {"format": {"type": "json_schema", "schema": WEATHER}, "effort": "high"}
        await post(url, output_config=form)
    named, one, free, formed = (request.sampling_params.structured_outputs for request in engine.requests)
    assert named is not None
    assert json.loads(named.json or "") == WEATHER
    assert one is not None
    assert json.loads(one.json or "")["maxItems"] == 1
    assert free is None
    assert formed is not None
    assert json.loads(formed.json or "") == WEATHER


HISTORY: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "msg_1"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "abc", "name": "get_weather", "input": {"city": "Bern"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "And?"},
            {
                "type": "tool_result",
                "tool_use_id": "abc",
                "content": [{"type": "text", "text": "21"}],
                "is_error": False,
            },
        ],
    },
]


async def test_a_conversation_reaches_the_template(model: Path) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0a1"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    async with engine_alone(model, "Yes.") as (url, engine):
        await post(url, system=system, messages=HISTORY)
        await post(url, system="Be brief.", messages=[*ASK, {"role": "assistant", "content": "The"}])
        _, count = await post(url, "/count_tokens", system=system, messages=HISTORY, tools=TOOLS)
        await post(url, system=system, messages=HISTORY, tools=TOOLS)
    prompts = [Tokenizer.load(model).decode(request.prompt_token_ids) for request in engine.requests]
    assert prompts[0] == (
        "<system>Be brief.<user>Weather?<assistant>I look.[abc get_weather Bern]<tool>21(abc)<user>And?<assistant>"
    )
    assert prompts[1] == "<system>Be brief.<user>Weather?<assistant>The", "the model goes on with its own words"
    assert count == {"input_tokens": len(engine.requests[2].prompt_token_ids)}


TOOL_CHANGES: list[Any] = [
    {"type": "text", "text": "More tools."},
    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "stop"}},
    {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "go", "input_schema": {}}}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}},
]


async def test_tools_change_within_a_conversation(tmp_path: Path) -> None:
    """As coding agents that search for tools send them: some are declared to be loaded later, and added when found."""
    directory = write_tokenizer(tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}[{{ t.function.name }}{{ ' later' if t.function.defer_loading }}]{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    tools = [TOOLS[0], {**TOOLS[1], "defer_loading": True}]
    found = [{"type": "text", "text": "Found:"}, {"type": "tool_reference", "tool_name": "stop"}]
    history = [*HISTORY[:2], {"role": "user", "content": [{**HISTORY[2]["content"][1], "content": found}]}]
    cases: list[tuple[Any, str]] = [
        (ASK, "[get_weather][stop later]<user>Weather?"),
        (
            [*ASK, {"role": "system", "content": TOOL_CHANGES[:2]}],
            "[get_weather][stop]<user>Weather?<system>More tools.",
        ),
        ([*ASK, {"role": "system", "content": TOOL_CHANGES[1:]}], "[stop][go]<user>Weather?"),
        (
            [*ASK, *({"role": "system", "content": [change]} for change in TOOL_CHANGES[:0:-1])],
            "[stop][go]<user>Weather?",
        ),
        (history, "[get_weather][stop later]<user>Weather?<assistant>I look.<tool>Found:\nstop"),
    ]
    async with engine_alone(directory, "Yes.") as (url, engine):
        for messages, wanted in cases:
            assert (await post(url, tools=tools, messages=messages))[0] == 200
            assert Tokenizer.load(directory).decode(engine.requests[-1].prompt_token_ids) == wanted


async def test_system_messages_later_on_join_the_first_where_the_template_wants_that(
    model: Path, tmp_path: Path
) -> None:
    messages = [*ASK, {"role": "system", "content": "Be kind."}, {"role": "user", "content": "b"}]
    strict = write_tokenizer(tmp_path)
    (strict / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    for directory, wanted in (
        (model, "<system>Be brief.<user>Weather?<system>Be kind.<user>b<assistant>"),
        (strict, "<system>Be brief.Be kind.<user>Weather?<user>b<assistant>"),
    ):
        async with engine_alone(directory, "Yes.") as (url, engine):
            assert (await post(url, system="Be brief.", messages=messages))[0] == 200
        assert Tokenizer.load(directory).decode(engine.requests[0].prompt_token_ids) == wanted


async def test_thinking_is_what_the_template_lets_it_be(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}({{ enable_thinking }} {{ reasoning_effort }})"
    )
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "( )"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "(True )"),
        ({"thinking": {"type": "disabled"}}, "(False )"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "(True high)"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "(False high)"),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, "(True )"),
    ]
    async with engine_alone(directory, "Yes.") as (url, engine):
        for body, wanted in cases:
            assert (await post(url, **body))[0] == 200
            assert Tokenizer.load(directory).decode(engine.requests[-1].prompt_token_ids) == f"<user>Weather?{wanted}"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1 << 20}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"messages": [*ASK, {"role": "system", "content": [{"type": "tool_addition"}]}]}, "messages[1].content[0].tool"),
    (
        {"messages": [*ASK, {"role": "system", "content": TOOL_CHANGES[:2]}], "tools": TOOLS[:1]},
        "messages[1].content[1].tool.name",
    ),
    (
        {"messages": [*ASK, {"role": "system", "content": [{**TOOL_CHANGES[2], "type": "tool_removal"}]}]},
        "messages[1].content[0].tool",
    ),
    ({"messages": [{"role": "user", "content": TOOL_CHANGES[1:]}], "tools": TOOLS}, "messages[0].content[0]"),
    ({"system": TOOL_CHANGES, "messages": ASK, "tools": TOOLS}, "system"),
    ({"mcp_servers": [{"url": "https://a.example"}]}, "mcp_servers"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"n": 2}, "n"),
    ({"stop": "x"}, "stop_sequences"),
    ({"response_format": {"type": "json_object"}}, "output_config.format"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
]


@pytest.mark.parametrize(("body", "named"), BAD)
async def test_unserved_fields_are_refused_by_name_in_the_apis_error_shape(
    model: Path, body: dict[str, Any], named: str
) -> None:
    async with engine_alone(model, "x") as (url, engine):
        for more in ({}, {"stream": True}):
            status, told = await post(url, **body, **more)
            assert (status, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
            assert named in told["error"]["message"]
    assert not engine.requests


async def test_errors_have_anthropics_shape(model: Path) -> None:
    async with engine_alone(model, "x") as (url, engine):
        status, told = await post(url, model="claude-other")
        assert (status, told["error"]["type"]) == (404, "not_found_error")
        status, told = await post(url, "/count_tokens", model="claude-other")
        assert (status, told["error"]["type"]) == (404, "not_found_error")
        engine.fail = "full"
        status, told = await post(url)
        assert (status, told["error"]["type"]) == (429, "rate_limit_error")
        engine.fail = "down"
        status, told = await post(url, stream=True)
        assert (status, told["error"]["type"]) == (503, "overloaded_error")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/messages") as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")


@pytest.mark.parametrize("headers", [{"X-Api-Key": "secret"}, {"Authorization": "Bearer secret"}])
async def test_keys_come_in_either_header(model: Path, headers: dict[str, str]) -> None:
    app = build_app(FakeEngine(model), Tokenizer.load(model), access=Access(("other", "secret")))  # type: ignore[arg-type]
    body = {"model": "fake", "max_tokens": 4, "messages": ASK}
    async with served(app) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/messages", json=body, headers=headers) as response:
            assert response.status == 200
        for wrong in ({}, {"X-Api-Key": "secre"}, {"Authorization": "Basic secret"}, {"X-Api-Key": ""}):
            async with session.post(f"{url}/v1/messages", json=body, headers=wrong) as response:
                assert (response.status, (await response.json())["error"]["type"]) == (401, "authentication_error")

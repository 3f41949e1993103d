"""Tools by the official client: tools in the prompt, calls in the answer, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from baton.errors import ConfigError
from baton.openai.tools import Parsing
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served, write_tokenizer

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}\n{% endfor %}<assistant>"
)
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
CALLS = (
    'I look.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>\n'
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
)
HERMES = Parsing(True, "hermes", None)


@pytest.fixture(scope="module")
def tools_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tokenizer(tmp_path_factory.mktemp("tools"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


async def with_client(
    directory: Path, text: str, parsing: Parsing, act: Callable[[openai.AsyncOpenAI], Any]
) -> tuple[FakeEngine, Any]:
    """Run `act` with a client of an engine that answers with `text`."""
    engine = FakeEngine(directory)
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4096)
    engine.tokens = list(Tokenizer.load(directory).encode(text, False))
    engine.length = len(engine.tokens) + 1
    app = build_app(engine, Tokenizer.load(directory), parsing=parsing)
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return engine, await act(client)


def chat(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "fake", "messages": ASK, "tools": TOOLS, **more})


async def streamed(client: openai.AsyncOpenAI, **more: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that a stream adds up to, and its deltas."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    deltas = []
    async for event in await chat(client, stream=True, **more):
        (choice,) = event.choices
        delta = choice.delta
        deltas.append(delta)
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["calls"])
                assert call.type == "function"
                message["calls"].append([call.id, call.function.name, ""])
            assert (call.id is None) == (call.function.name is None)
            message["calls"][call.index][2] += call.function.arguments
        message["finish"] = choice.finish_reason or message["finish"]
    return message, deltas


async def test_calls_whole_and_streamed(tools_directory: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        answer = await chat(client)
        message = answer.choices[0].message
        assert message.content == "I look.\n"
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("get_weather", '{"city": "Bern"}'),
            ("stop", "{}"),
        ]
        assert len({c.id for c in message.tool_calls}) == 2
        assert all(len(c.id) == 9 and c.id.isalnum() for c in message.tool_calls), "all that Mistral's templates take"
        assert answer.choices[0].finish_reason == "tool_calls"
        stream, deltas = await streamed(client)
        assert stream["content"] == "I look.\n"
        assert [call[1:] for call in stream["calls"]] == [["get_weather", '{"city": "Bern"}'], ["stop", "{}"]]
        assert stream["finish"] == "tool_calls"
        assert [delta.role for delta in deltas].count("assistant") == 1
        assert max(len(c.function.arguments) for d in deltas for c in d.tool_calls or []) < 10, "arguments in pieces"

    engine, _ = await with_client(tools_directory, CALLS, HERMES, act)
    prompt = Tokenizer.load(tools_directory).decode(engine.requests[0].prompt_token_ids)
    assert json.loads(prompt.splitlines()[0])[0] == TOOLS[0]
    assert engine.requests[0].sampling_params.structured_outputs is None


async def test_calls_and_their_results_become_the_next_prompt(tools_directory: Path) -> None:
    """An answer's calls and their results are the history of the next request."""

    async def act(client: openai.AsyncOpenAI) -> None:
        message = (await chat(client)).choices[0].message
        history = [*ASK, message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        await chat(client, messages=history)
        engine_saw.extend(call.id for call in message.tool_calls)

    engine_saw: list[str] = []
    engine, _ = await with_client(tools_directory, CALLS, HERMES, act)
    first, second = engine_saw
    prompt = Tokenizer.load(tools_directory).decode(engine.requests[1].prompt_token_ids)
    assert f"<assistant>I look.\n[{first} get_weather Bern][{second} stop ]<tool>sunny({first})<tool>" in prompt


async def test_choices_that_force_a_call(tools_directory: Path) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}

    async def act(client: openai.AsyncOpenAI) -> Any:
        whole = (await chat(client, tool_choice=choice, parallel_tool_calls=False)).choices[0]
        stream, _ = await streamed(client, tool_choice=choice)
        assert stream["calls"][0][1:] == ["get_weather", '{"city": "Bern"}']
        assert stream["finish"] == whole.finish_reason
        return whole

    choice: Any = "required"
    text = '[{"name": "get_weather", "parameters": {"city": "Bern"}}]'
    engine, whole = await with_client(tools_directory, text, Parsing(), act)
    assert whole.message.content is None
    assert whole.finish_reason == "tool_calls"
    grammar = json.loads(engine.requests[0].sampling_params.structured_outputs.json)
    assert grammar["maxItems"] == grammar["minItems"] == 1
    assert [item["properties"]["name"]["enum"] for item in grammar["items"]["anyOf"]] == [["get_weather"], ["stop"]]
    assert "maxItems" not in json.loads(engine.requests[1].sampling_params.structured_outputs.json)

    choice = named
    engine, whole = await with_client(tools_directory, '{"city": "Bern"}', Parsing(), act)
    assert whole.finish_reason == "stop"
    grammar = json.loads(engine.requests[0].sampling_params.structured_outputs.json)
    assert grammar == TOOLS[0]["function"]["parameters"]


async def test_calls_stay_text_without_tools_to_choose(tools_directory: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        for more in ({"tool_choice": "none"}, {"tools": openai.omit}):
            message = (await chat(client, **more)).choices[0].message
            assert message.content == CALLS
            assert message.tool_calls is None

    await with_client(tools_directory, CALLS, HERMES, act)


async def test_reasoning_and_calls(tools_directory: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        message = (await chat(client)).choices[0].message
        assert (message.content, message.reasoning_content, message.reasoning) == ("\n\nI look.\n", "Hm.", "Hm.")
        assert len(message.tool_calls) == 2
        stream, _ = await streamed(client)
        assert (stream["reasoning"], stream["content"], len(stream["calls"])) == ("Hm.", "\n\nI look.\n", 2)
        hidden = (await chat(client, extra_body={"include_reasoning": False})).choices[0].message
        assert not hasattr(hidden, "reasoning_content")
        stream, _ = await streamed(client, extra_body={"include_reasoning": False})
        assert (stream["reasoning"], stream["content"]) == ("", "\n\nI look.\n")

    text = f"<think>Hm.</think>\n\n{CALLS}"
    await with_client(tools_directory, text, Parsing(True, "hermes", "qwen3"), act)


async def test_an_answer_under_a_grammar_has_no_reasoning(tools_directory: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        made = await chat(client, tools=openai.omit, response_format={"type": "json_object"})
        assert made.choices[0].message.content == '{"a": 1}'

    await with_client(tools_directory, '{"a": 1}', Parsing(False, None, "deepseek_r1"), act)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS + TOOLS[:1]}, "tools[2].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [TOOLS[1]] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 99_999}}]}, "tools"),
    ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("more", "param"), BAD)
async def test_invalid_tools_are_refused_by_name(tools_directory: Path, more: dict[str, Any], param: str) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, **more)
        assert refused.value.param == param

    engine, _ = await with_client(tools_directory, "x", HERMES, act)
    assert not engine.requests


async def test_a_schema_reaches_the_template_as_it_is_however_deep(tools_directory: Path) -> None:
    deep: Any = {"default": None}
    for _ in range(400):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"items": [deep]}}}]

    async def act(client: openai.AsyncOpenAI) -> None:
        await chat(client, tools=tools, tool_choice="none")

    engine, _ = await with_client(tools_directory, "x", HERMES, act)
    prompt = Tokenizer.load(tools_directory).decode(engine.requests[0].prompt_token_ids)
    assert prompt.count('{"a": ') == 400
    assert '{"default": null}' in prompt


async def test_automatic_calls_need_the_flags(tools_directory: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        for more in ({}, {"tool_choice": "auto"}):
            with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice") as refused:
                await chat(client, **more)
            assert refused.value.param == "tool_choice"

    await with_client(tools_directory, "x", Parsing(), act)


@pytest.mark.parametrize(
    ("field", "parsing"),
    [
        ("tool_call_parser", {"tool_call_parser": "none such"}),
        ("tool_call_parser", {"enable_auto_tool_choice": True}),
        ("reasoning_parser", {"reasoning_parser": "none such"}),
    ],
)
def test_a_parser_that_there_is_not_is_refused(field: str, parsing: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        Parsing(**parsing)  # type: ignore[arg-type]


async def test_channels_are_read_with_their_markers(tools_directory: Path) -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."

    async def act(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model="fake", messages=ASK)

    _, answer = await with_client(tools_directory, text, Parsing(reasoning_parser="openai_gptoss"), act)
    assert (answer.choices[0].message.content, answer.choices[0].message.reasoning_content) == ("Sunny.", "Hm.")

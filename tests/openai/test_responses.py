"""The Responses API by the official client: requests, answers (streamed or not), and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pydantic
import pytest

from baton.openai.tools import Parsing
from baton.sampling_params import StructuredOutputsParams
from baton.server import build_app
from baton.text import Tokenizer
from baton.wire import TokenChunk
from testkit.servers.fake_serving import FakeEngine, served, write_tokenizer
from tests.openai.test_tools import with_client

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
    {"type": "function", "name": "stop"},
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}{{ '{' + m.reasoning_content + '}' }}{% endif %}"
    "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}\n{% endfor %}<assistant>"
)
ANSWER = (
    "<think>Bern, é?</think>I look.\n"
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>\n'
    '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
)
BOTH = Parsing(True, "hermes", "qwen3")
ARGUMENTS = {"city": "Bern"}


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tokenizer(tmp_path_factory.mktemp("responses"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


async def ask(
    directory: Path, text: str, act: Callable[[openai.AsyncOpenAI], Any], parsing: Parsing = BOTH
) -> tuple[FakeEngine, Any]:
    """Run `act` with a client of an engine that answers with `text`."""
    return await with_client(directory, text, parsing, act)


def create(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": "fake", "input": "Weather?", **more})


def prompt(engine: FakeEngine, directory: Path) -> str:
    return Tokenizer.load(directory).decode(engine.requests[-1].prompt_token_ids)


async def test_an_answer_is_a_message(model: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        return await create(
            client,
            instructions="Be brief.",
            temperature=0,
            max_output_tokens=50,
            metadata={"a": "b"},
            extra_body={"seed": 7, "top_k": 4},
        )

    engine, response = await ask(model, "Sunny.", act)
    assert prompt(engine, model) == "<system>Be brief.<user>Weather?<assistant>"
    params = engine.requests[0].sampling_params
    assert (params.max_tokens, params.temperature, params.seed, params.top_k) == (50, 0, 7, 4)
    assert response.output_text == "Sunny."
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.status, response.store, response.metadata) == ("completed", False, {"a": "b"})
    assert (response.instructions, response.max_output_tokens) == ("Be brief.", 50)
    num_prompt = len(engine.requests[0].prompt_token_ids)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (num_prompt, 7)
    assert response.usage.total_tokens == num_prompt + 7


async def test_whole_and_streamed_answers_are_the_same(model: Path) -> None:
    """The events, each level repeated when it is done, add up to the whole answer: reasoning, words and calls."""

    async def act(client: openai.AsyncOpenAI) -> Any:
        whole = await create(client, tools=TOOLS)
        return whole, [event async for event in await create(client, tools=TOOLS, stream=True)]

    _, (whole, events) = await ask(model, ANSWER, act)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, weather, stop = whole.output
    assert reasoning.content[0].text == "Bern, é?"
    assert message.content[0].text == "I look.\n"
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", ARGUMENTS)
    assert (stop.name, json.loads(stop.arguments)) == ("stop", {})
    assert weather.call_id != stop.call_id
    assert whole.usage.output_tokens_details.reasoning_tokens == len("Bern, é?".encode())

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    final = events[-1].response
    strip = {"id", "call_id", "created_at"}
    told = [{k: v for k, v in item.to_dict().items() if k not in strip} for item in final.output]
    assert told == [{k: v for k, v in item.to_dict().items() if k not in strip} for item in whole.output]
    assert final.usage == whole.usage
    added: dict[int, str] = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(added)
            added[event.output_index] = ""
            assert event.item.status == "in_progress"
        elif event.type.endswith(".delta"):
            added[event.output_index] += event.delta
            assert event.item_id == final.output[event.output_index].id
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == added[event.output_index]
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == added[event.output_index]
        elif event.type == "response.output_item.done":
            assert event.item == final.output[event.output_index]
    assert added == {0: "Bern, é?", 1: "I look.\n", 2: weather.arguments, 3: stop.arguments}


async def test_a_loop_of_tools(model: Path) -> None:
    """Items of an answer are sent back unchanged, with the function's result."""

    async def act(client: openai.AsyncOpenAI) -> Any:
        first = await create(client, tools=TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        said: list[Any] = ["7 degrees", [{"type": "input_text", "text": text} for text in ("ok", "now")]]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in zip(calls, said, strict=True)
        ]
        question = [{"type": "input_text", "text": text} for text in ("Weather", "today?")]
        asked = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": question}]
        await create(client, tools=TOOLS, input=[*asked, *first.output, *outputs])
        return calls

    engine, (weather, stop) = await ask(model, ANSWER, act)
    text = prompt(engine, model)
    shown = text.partition("\n")[2]
    assert shown == (
        "<system>Be kind.<user>Weather\ntoday?"
        f"<assistant>I look.\n{{Bern, é?}}[{weather.call_id} get_weather Bern][{stop.call_id} stop ]"
        f"<tool>7 degrees({weather.call_id})<tool>ok\nnow({stop.call_id})<assistant>"
    )
    tools = json.loads(text.partition("\n")[0])
    assert tools[0]["function"]["name"] == "get_weather"


def group(name: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "x", "tools": [{"type": "function", "name": "run"}]}


AGENTS_TOOLS: list[Any] = [
    TOOLS[0],
    {"type": "custom", "name": "patch", "description": "Change files."},
    group("mcp"),
    {"type": "web_search", "external_web_access": False},
]
PATCH = '*** Begin\n+ "é"\n'
AGENTS_CALLS = (
    f'<tool_call>{{"name": "patch", "arguments": {json.dumps({"input": PATCH})}}}</tool_call>\n'
    '<tool_call>{"name": "mcp__run", "arguments": {"city": "Bern"}}</tool_call>'
)


async def test_custom_tools_and_namespaces_are_functions_of_the_model(model: Path) -> None:
    """As coding agents send them, along with tools that OpenAI runs, which the model is not shown (as in vLLM)."""

    async def act(client: openai.AsyncOpenAI) -> Any:
        whole = await create(client, tools=AGENTS_TOOLS)
        events = [event async for event in await create(client, tools=AGENTS_TOOLS, stream=True)]
        patch, run = whole.output
        outputs = [
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
            {"type": "function_call_output", "call_id": run.call_id, "output": "ran"},
        ]
        asked = [{"role": "user", "content": "Go."}, *whole.output, *outputs]
        again = await create(client, tools=AGENTS_TOOLS, input=asked, tool_choice={"type": "function", "name": "run"})
        return whole, events, again

    engine, (whole, events, again) = await ask(model, AGENTS_CALLS, act)
    patch, run = whole.output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", PATCH)
    assert (run.type, run.namespace, run.name, json.loads(run.arguments)) == ("function_call", "mcp", "run", ARGUMENTS)
    assert [tool.type for tool in whole.tools] == ["function", "custom", "namespace", "web_search"]
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [patch.type, run.type]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = (event.input for event in events if event.type == "response.custom_tool_call_input.done")
    assert "".join(deltas) == done == PATCH
    assert events[-1].response.output[0].input == PATCH

    shown, _, history = prompt(engine, model).partition("\n")
    functions = [tool["function"] for tool in json.loads(shown)]
    assert [function["name"] for function in functions] == ["get_weather", "patch", "mcp__run"]
    assert functions[1]["parameters"]["required"] == ["input"]
    assert history == (
        f"<user>Go.<assistant>[{patch.call_id} patch ][{run.call_id} mcp__run Bern]"
        f"<tool>done({patch.call_id})<tool>ran({run.call_id})<assistant>"
    )
    (called,) = again.output
    assert (called.namespace, called.name) == ("mcp", "run")


@pytest.mark.parametrize("arguments", ['{"input": "cut', "plain text", '{"other": 1}', '{"input": "\\ud800"}'])
async def test_arguments_of_another_form_are_a_custom_tools_input(model: Path, arguments: str) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        return await create(client, tools=AGENTS_TOOLS, tool_choice={"type": "custom", "name": "patch"})

    _, response = await ask(model, arguments, act)
    assert [(item.type, item.input) for item in response.output] == [("custom_tool_call", arguments)]


async def test_parse_and_a_named_function(model: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        parsed = await client.responses.parse(model="fake", input="Weather?", text_format=Weather)
        named = await create(client, tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"})
        return parsed, named

    engine, (parsed, named) = await ask(model, '{"city": "Bern", "degrees": 7}', act, Parsing())
    assert parsed.output_parsed == Weather(city="Bern", degrees=7)
    grammar, forced = (
        request.sampling_params.structured_outputs or StructuredOutputsParams() for request in engine.requests
    )
    assert json.loads(grammar.json or "")["required"] == ["city", "degrees"]
    assert json.loads(forced.json or "") == TOOLS[0]["parameters"]
    (call,) = named.output
    assert (call.type, call.name) == ("function_call", "get_weather")


async def test_the_clients_stream_helper(model: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(model="fake", input="Weather?", text_format=Weather) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    _, response = await ask(model, '{"city": "Bern", "degrees": 7}', act, Parsing())
    assert response.output_parsed == Weather(city="Bern", degrees=7)


async def test_an_answer_cut_short_is_incomplete(model: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        whole = await create(client, max_output_tokens=3)
        return whole, [event async for event in await create(client, max_output_tokens=3, stream=True)]

    _, (whole, events) = await ask(model, "Sunny.", act)
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.output_text, response.output[0].status) == ("Sun", "incomplete")
    assert events[-1].type == "response.incomplete"


async def test_an_empty_answer_is_an_empty_message(model: Path) -> None:
    _, response = await ask(model, "", create)
    assert (response.output_text, len(response.output), response.status) == ("", 1, "completed")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [group(name) for name in "ab"], "tool_choice": {"type": "function", "name": "run"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": TOOLS}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "input[0].encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"temperature": -1}, "temperature"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words"),
        ({"extra_body": {"guided_json": {}, "bad": 1, "lora_request": "x"}}, "lora_request"),
    ],
)
async def test_unserved_fields_are_refused_by_name(model: Path, more: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(model, "Sunny.", lambda client: create(client, **more))
    assert refused.value.param == field
    assert field.split("[")[0].split(".")[0] in refused.value.message


async def test_another_model_is_not_found(model: Path) -> None:
    with pytest.raises(openai.NotFoundError):
        await ask(model, "Sunny.", lambda client: create(client, model="other"))


async def test_a_stream_that_fails_says_so(model: Path) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        return [event async for event in await create(client, stream=True)]

    class Failing(FakeEngine):
        async def generate(self, request: Any) -> Any:
            yield TokenChunk(request_id=request.request_id, token_ids=[83])
            yield TokenChunk(request_id=request.request_id, finish_reason="error", error="transfer_failed: lost")

    engine = Failing(model, length=7)
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4096)
    app = build_app(engine, Tokenizer.load(model))
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        events = await act(client)
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "transfer_failed: lost")

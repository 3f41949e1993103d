"""Fields of the Responses API: each known one is honoured or refused by name. And the official types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.refused_fields import FORBIDDEN
from baton.openai.refused_fields import REFUSED as REFUSED_EVERYWHERE
from baton.openai.requests import ChatRequest, CompletionRequest
from baton.openai.responses import make_response_plan
from baton.openai.responses.requests import REFUSED, ResponsesRequest
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import TEXT, FakeEngine, served
from tests.openai.test_fields import IGNORED

HONOURED = set(ResponsesRequest.__struct_fields__)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def model(directory: Path) -> ServedModel:
    return ServedModel("fake", Tokenizer.load(directory), 256, 258, 0)


def plan(served_model: ServedModel, **body: Any) -> Any:
    return make_response_plan(json.dumps({"input": "a", **body}).encode(), served_model)


def test_no_field_is_ignored_in_silence(model: ServedModel) -> None:
    known = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    known |= {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert known <= HONOURED | REFUSED.keys() | REFUSED_EVERYWHERE.keys() | FORBIDDEN | IGNORED.keys()
    assert not HONOURED & (REFUSED.keys() | FORBIDDEN)
    for name, refused in REFUSED.items():
        for value in ("something", 7, ["x" * 100], {"a": "b"}):
            with pytest.raises(RequestError, match=name) as error:
                plan(model, **{name: value})
            assert error.value.param == name
            assert "\n" not in str(error.value)
        for value in (None, *refused.neutral):
            plan(model, **{name: value})
    for name in HONOURED:
        with pytest.raises(RequestError) as malformed:
            plan(model, **{name: [{"a": []}]})
        assert str(malformed.value.param).startswith(name), "it is looked at"


def test_fields_of_chats_reach_the_engine(model: ServedModel) -> None:
    asked = {"allowed_token_ids": [1, 2], "bad_words": ["q"], "min_tokens": 3, "stop_token_ids": [9], "top_k": 5}
    (request,) = plan(model, structured_outputs={"regex": "a+"}, max_output_tokens=9, **asked).plan.requests
    params = request.sampling_params
    assert (params.allowed_token_ids, params.bad_words, params.min_tokens) == ((1, 2), ("q",), 3)
    assert (params.stop_token_ids, params.top_k, params.max_tokens) == ((9,), 5, 9)
    assert params.structured_outputs is not None
    assert params.structured_outputs.regex == "a+"


@pytest.mark.parametrize(("num", "message"), [(4095, "nonsense"), (4096, "at most 4096 items")])
def test_items_are_counted_before_they_are_read(model: ServedModel, num: int, message: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    body = json.dumps({"input": [{"type": "nonsense"}, *[call] * num]}).encode()
    with pytest.raises(RequestError, match=message):
        make_response_plan(body, model)


def test_a_result_needs_its_call(model: ServedModel) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    with pytest.raises(RequestError) as refused:
        plan(model, input=[call, {"type": "function_call_output", "call_id": "d", "output": "x"}])
    assert refused.value.param == "input[1].call_id"


async def test_answers_are_what_the_official_types_want(directory: Path) -> None:
    app = build_app(FakeEngine(directory, length=10), Tokenizer.load(directory))  # type: ignore[arg-type]
    async with served(app) as url, aiohttp.ClientSession() as session:
        body = {"model": "fake", "input": "a", "metadata": {"a": "b"}, "tools": [], "instructions": "x"}
        async with session.post(f"{url}/v1/responses", json=body) as response:
            whole = Response.model_validate(await response.json())
        async with session.post(f"{url}/v1/responses", json={**body, "stream": True}) as response:
            lines = (await response.text()).splitlines()
        events = [EVENTS.validate_json(line[6:]) for line in lines if line.startswith("data: ")]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [line[7:] for line in lines if line.startswith("event: ")] == [event.type for event in events]
        assert events[-1].response.output_text == whole.output_text == TEXT[:9]
        assert events[-1].response.usage == whole.usage


async def test_no_response_is_kept(directory: Path) -> None:
    app = build_app(FakeEngine(directory), Tokenizer.load(directory))  # type: ignore[arg-type]
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="not kept here"):
                await act("resp_1")

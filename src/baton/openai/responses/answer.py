"""`POST /v1/responses`: a request runs as a chat, and its output becomes a response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.chat_answer import respond_as_chat
from baton.openai.format import Json, usage
from baton.openai.http.api_errors import ApiError
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.plan import Plan, plan_chat
from baton.openai.requests import check_request
from baton.openai.responses.items import Items
from baton.openai.responses.requests import ResponsesRequest, field_here, read_request, rename_field, to_chat
from baton.openai.responses.tools import names_of
from baton.openai.service import OpenAIService
from baton.openai.tools import NO_PARSING, Parsing


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    request: ResponsesRequest
    plan: Plan

    @property
    def id(self) -> str:
        """The chat's id with OpenAI's prefix; log lines have the same number."""
        return f"resp_{self.plan.id.partition('-')[2]}"


def make_response_plan(body: bytes, model: ServedModel, parsing: Parsing = NO_PARSING) -> ResponsePlan:
    """Raises `RequestError`, `UnknownModelError`."""
    request = read_request(body)
    try:
        plan = plan_chat(check_request(to_chat(request)), model, parsing)
    except RequestError as error:
        raise rename_field(error) from None
    return ResponsePlan(request, msgspec.structs.replace(plan, grammar_field=field_here(plan.grammar_field)))


async def respond(service: OpenAIService, asked: ResponsePlan) -> bytes | AsyncGenerator[bytes, None]:
    outputs = service.begin(asked.plan)
    return await respond_as_chat(service, asked.plan, outputs, ResponseAnswer(asked, outputs[0]))


class ResponseAnswer:
    """A `ChatAnswer` whose streamed events are numbered."""

    def __init__(self, asked: ResponsePlan, output: ChoiceOutput) -> None:
        self._asked, self._output = asked, output
        self._items = Items(asked.id, output, asked.plan.returns_reasoning, names_of(asked.request.tools or ()))
        self._num_events = 0

    def begin(self) -> Iterable[Json]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": _response(self._asked, self._items, None)}

    def push(self, delta: Delta) -> Iterable[Json]:
        return self._items.push(delta, self._asked.plan.reader is not None)

    def end(self) -> Iterable[Json]:
        whole = _response(self._asked, self._items, self._output)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def body(self) -> bytes:
        return msgspec.json.encode(_response(self._asked, self._items, self._output))

    def encode(self, event: Json) -> bytes:
        body = msgspec.json.encode(event | {"sequence_number": self._num_events})
        self._num_events += 1
        return f"event: {event['type']}\ndata: ".encode() + body + b"\n\n"

    def encode_error(self, error: ApiError) -> bytes:
        failed = _response(self._asked, self._items, None) | {"status": "failed"}
        failed["error"] = {"code": "server_error", "message": error.message}
        return self.encode({"type": "response.failed", "response": failed})


def _response(asked: ResponsePlan, items: Items, output: ChoiceOutput | None) -> Json:
    """`output` is None before the end."""
    request, plan = asked.request, asked.plan
    stopped_short = output is not None and output.finish_reason == "length"
    reasoning: Any = request.reasoning or {"effort": None, "summary": None}
    return {
        "id": asked.id,
        "object": "response",
        "created_at": plan.created,
        "status": "in_progress" if output is None else "incomplete" if stopped_short else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if stopped_short else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": plan.model.name,
        "output": items.items,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": reasoning,
        "store": False,
        "temperature": plan.asked.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [tool.echo() for tool in request.tools or ()],
        "top_p": plan.asked.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None if output is None else _usage(plan, output),
        "user": request.user,
    }


def _usage(plan: Plan, output: ChoiceOutput) -> Json:
    """Reasoning tokens are counted by tokenising the reasoning, since parsers work on text."""
    counted = usage(plan, [output])
    reasoning = output.parsed.reasoning
    num_reasoning = len(plan.model.tokenizer.encode(reasoning, False)) if reasoning else 0
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": min(num_reasoning, counted.completion_tokens)},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }

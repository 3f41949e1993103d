"""`POST /v1/messages`: a request runs as a chat, and its output becomes a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

import msgspec

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.chat_answer import respond_as_chat
from baton.openai.conversation import chat_prompt, chat_text
from baton.openai.format import Json
from baton.openai.http.api_errors import ApiError
from baton.openai.messages.content_blocks import Blocks
from baton.openai.messages.message_errors import error_event
from baton.openai.messages.requests import read_count, read_request, rename_field, to_chat
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.plan import Plan, check_model, plan_chat, template_variables
from baton.openai.requests import check_request
from baton.openai.service import OpenAIService
from baton.openai.tools import NO_PARSING, CheckedTools, Parsing


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """The plan of the chat that serves a message."""

    plan: Plan

    @property
    def id(self) -> str:
        """The chat's id with Anthropic's prefix; log lines have the same number."""
        return f"msg_{self.plan.id.partition('-')[2]}"


def make_message_plan(body: bytes, model: ServedModel, parsing: Parsing = NO_PARSING) -> MessagePlan:
    """Raises `RequestError`, `UnknownModelError`."""
    request = read_request(body)
    model = check_model(request.model, model)
    try:
        plan = plan_chat(check_request(to_chat(request, model)), model, parsing)
    except RequestError as error:
        raise rename_field(error) from None
    field = rename_field(RequestError(plan.grammar_field, plan.grammar_field)).param
    return MessagePlan(msgspec.structs.replace(plan, grammar_field=field or plan.grammar_field))


def count_tokens(body: bytes, model: ServedModel) -> Json:
    """Raises the errors of `make_message_plan`."""
    request = read_count(body)
    check_model(request.model, model)
    try:
        chat = to_chat(request, model)
        tools = CheckedTools.of(chat.tools, chat.tool_choice, chat.parallel_tool_calls).for_template()
        text = chat_text(chat, chat.messages, template_variables(chat, model), tools, model)
        return {"input_tokens": len(chat_prompt(text, chat, model))}
    except RequestError as error:
        raise rename_field(error) from None


async def respond(service: OpenAIService, asked: MessagePlan) -> bytes | AsyncGenerator[bytes, None]:
    outputs = service.begin(asked.plan)
    return await respond_as_chat(service, asked.plan, outputs, MessageAnswer(asked, outputs[0]))


class MessageAnswer:
    def __init__(self, asked: MessagePlan, output: ChoiceOutput) -> None:
        self._asked, self._output = asked, output
        self._blocks = Blocks(output, asked.id)

    def begin(self) -> Iterable[Json]:
        nothing: Json = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._message([]) | nothing}

    def push(self, delta: Delta) -> Iterable[Json]:
        return self._blocks.push(delta, self._asked.plan.reader is not None)

    def end(self) -> Iterable[Json]:
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def body(self) -> bytes:
        return msgspec.json.encode(self._message(self._blocks.blocks) | self._end())

    def encode(self, event: Json) -> bytes:
        return f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"

    def encode_error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._asked.id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.plan.model.name,
            "content": content,
            "usage": self._usage(),
        }

    def _end(self) -> Json:
        reason, sequence = self._blocks.stop_reason()
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> Json:
        """As in Anthropic's API, `input_tokens` excludes cached tokens."""
        cached = self._output.num_cached_tokens
        return {
            "input_tokens": len(self._asked.plan.prompts[0]) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(self._output.token_ids),
        }

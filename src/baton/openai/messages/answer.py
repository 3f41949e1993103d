"""`POST /v1/messages`: a request runs as a chat, and its output becomes a message."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import msgspec

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.conversation import chat_prompt, chat_text
from baton.openai.format import Json
from baton.openai.http.errors import to_api_error
from baton.openai.messages.blocks import Blocks
from baton.openai.messages.errors import error_event
from baton.openai.messages.requests import named_here, read, read_count, to_chat
from baton.openai.output import SampleOutput
from baton.openai.plan import Plan, check_model, plan_chat, template_variables
from baton.openai.requests import checked
from baton.openai.service import OpenAIService, prepend
from baton.openai.tools import NO_PARSING, CheckedTools, Parsing


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """The plan of the chat that serves a message."""

    plan: Plan

    @property
    def id(self) -> str:
        """The message's id, with the chat's number in log lines."""
        return f"msg_{self.plan.id.partition('-')[2]}"


def make_message_plan(body: bytes, model: ServedModel, parsing: Parsing = NO_PARSING) -> MessagePlan:
    """Raises `RequestError` for what is not supported, `UnknownModelError` for another model."""
    request = read(body)
    check_model(request.model, model)
    try:
        plan = plan_chat(checked(to_chat(request, model)), model, parsing)
    except RequestError as error:
        raise named_here(error) from None
    field = named_here(RequestError(plan.grammar_field, plan.grammar_field)).param
    return MessagePlan(replace(plan, grammar_field=field or plan.grammar_field))


def count_tokens(body: bytes, model: ServedModel) -> Json:
    """The response to `POST /v1/messages/count_tokens`. Raises the errors of `make_message_plan`."""
    request = read_count(body)
    check_model(request.model, model)
    try:
        chat = to_chat(request, model)
        tools = CheckedTools.of(chat.tools, chat.tool_choice, chat.parallel_tool_calls).shown()
        text = chat_text(chat, chat.messages, template_variables(chat, model), tools, model)
        return {"input_tokens": len(chat_prompt(text, chat, model))}
    except RequestError as error:
        raise named_here(error) from None


async def respond(service: OpenAIService, asked: MessagePlan) -> bytes | AsyncGenerator[bytes, None]:
    """Return a body, or server-sent events to stream."""
    plan = asked.plan
    outputs = service.begin(plan)
    blocks = Blocks(outputs[0], asked.id)
    if plan.stream:
        events = _events(service, asked, outputs, blocks)
        # Wait for the first event: a refusal must set the HTTP status.
        return prepend(await anext(events), events)
    async with contextlib.aclosing(service.run(plan, outputs)) as deltas:
        async for _, delta in deltas:
            for _event in blocks.push(delta, plan.reader is not None):
                pass
    return msgspec.json.encode(_message(asked, outputs[0], blocks.blocks) | _end(blocks))


async def _events(
    service: OpenAIService, asked: MessagePlan, outputs: list[SampleOutput], blocks: Blocks
) -> AsyncGenerator[bytes, None]:
    plan, (output,) = asked.plan, outputs
    begun = False
    try:
        async with contextlib.aclosing(service.run(plan, outputs)) as deltas:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    nothing: Json = {"stop_reason": None, "stop_sequence": None}
                    yield _event({"type": "message_start", "message": _message(asked, output, []) | nothing})
                for event in blocks.push(delta, plan.reader is not None):
                    yield _event(event)
        yield _event({"type": "message_delta", "delta": _end(blocks), "usage": _usage(asked, output)})
        yield _event({"type": "message_stop"})
    except Exception as error:
        if not begun:
            raise
        yield error_event(to_api_error(error))


def _message(asked: MessagePlan, output: SampleOutput, content: list[Json]) -> Json:
    return {
        "id": asked.id,
        "type": "message",
        "role": "assistant",
        "model": asked.plan.model.name,
        "content": content,
        "usage": _usage(asked, output),
    }


def _end(blocks: Blocks) -> Json:
    reason, sequence = blocks.stop_reason()
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(asked: MessagePlan, output: SampleOutput) -> Json:
    """Anthropic's usage: `input_tokens` excludes cached tokens."""
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(asked.plan.prompts[0]) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(output.token_ids),
    }


def _event(event: Json) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"

"""Bodies of `POST /v1/responses`, converted to chats.

Source: OpenAI's Responses API. Responses are not stored, so `input` must be the whole conversation. Other fields: as
chat completions.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from baton.errors import RequestError
from baton.openai.refused_fields import Refused
from baton.openai.requests import ChatRequest, CommonFields, CompletionRequest, decode_body
from baton.openai.responses.conversation import InputItem, messages_of
from baton.openai.responses.tools import ChosenTool, ResponseTool, chosen_tool, shown_tools
from baton.openai.structured import JsonSchema, ResponseFormat

_KEPT = "is not supported: responses are not kept, so send the whole conversation as input"
# Accepted without effect: reasoning is returned as plain text.
_INCLUDED = "reasoning.encrypted_content"


class TextFormat(msgspec.Struct, kw_only=True):
    """`text.format`: as `response_format` of chats, flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(CommonFields, kw_only=True):
    """Clients send null for optional fields."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None


_SERVED = frozenset(ResponsesRequest.__struct_fields__)
_NEUTRAL: dict[str, tuple[object, ...]] = {"n": (1,), "add_generation_prompt": (True,)}
_CALLED = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    **{"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"},
}
# Besides the refusals of chats, with values without effect: a field that responses lack would be silently ignored.
REFUSED = {
    **{
        name: Refused("is not a field of responses", _NEUTRAL.get(name, (False,)))
        for name in {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - _SERVED
    },
    **{name: Refused(f"is called {here} in responses", ()) for name, here in _CALLED.items()},
    **{name: Refused(_KEPT, ()) for name in ("previous_response_id", "conversation", "previous_input_messages")},
    "background": Refused("is not supported: a response is computed while its client waits", (False,)),
    "background_options": Refused("is not supported: a response is computed while its client waits", ()),
    "prompt": Refused("is not supported: prompts are not kept here", ()),
    "max_tool_calls": Refused("is not supported: the client runs the tools", ()),
    "top_logprobs": Refused("is not supported here: chat completions have them", (0,)),
    "context_management": Refused("is not supported: an input is taken as it is", ()),
    "image": Refused("is not supported: only text is served", ()),
    "access_programs": Refused("is not supported", ()),
    "enable_response_messages": Refused("is not supported: the answer does not hold it", (False,)),
}
_AS_ASKED = _SERVED & {*ChatRequest.__struct_fields__} - {"tools", "tool_choice"}
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}


def read_request(body: bytes) -> ResponsesRequest:
    """Raises `RequestError`."""
    request = decode_body(body, ResponsesRequest, served=_SERVED, also=REFUSED)
    for item in request.include or ():
        if item != _INCLUDED:
            raise RequestError(f"include: {item!r} is not supported", "include")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise RequestError("text.verbosity is not supported", "text.verbosity")
    return request


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """Raises `RequestError` with the field's name."""
    same = {name: getattr(request, name) for name in _AS_ASKED}
    tools, choice = request.tools or (), request.tool_choice
    return ChatRequest(
        messages=messages_of(request.instructions, request.input),
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        response_format=_response_format(request.text),
        tools=shown_tools(tools) or None,
        tool_choice=chosen_tool(choice, tools) if isinstance(choice, ChosenTool) else choice,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        **same,
    )


def rename_field(error: RequestError) -> RequestError:
    """Name the response's field in a refusal of a chat's field."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    assert error.param is not None
    return RequestError(str(error).replace(error.param, name), name)


def field_here(name: str) -> str:
    return _NAMES.get(name, name)


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    wanted = None if text is None else text.format
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        schema = JsonSchema(
            name=wanted.name, description=wanted.description, schema=wanted.schema, strict=wanted.strict
        )
    return ResponseFormat(type=wanted.type, json_schema=schema)

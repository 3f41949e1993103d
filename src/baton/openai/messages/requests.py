"""Bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, converted to chats.

Source: Anthropic's Messages API, and vLLM where that is open. Other fields are those of chat completions.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.messages.conversation import Block, InputMessage, changes_of, messages_of
from baton.openai.messages.tools import AnthropicTool, tools_in_effect
from baton.openai.refused_fields import Refused
from baton.openai.requests import ChatRequest, decode_body
from baton.openai.structured import JsonSchema, ResponseFormat
from baton.openai.tools import FunctionName, NamedChoice, ToolChoice
from baton.wire import Mode

_THINKING = "enable_thinking"


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """`budget_tokens` has no effect; `max_tokens` is the limit."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any] | bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Clients send null for optional fields."""

    model: str
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    kv_mode: Mode | None = None


_SERVED = frozenset(MessagesRequest.__struct_fields__)
_CALLED = {
    **{"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config.format"},
    "reasoning_effort": "output_config.effort",
}
# Refused besides the refusals of chats: a field of chats that messages lack would be silently ignored.
REFUSED = {
    **{
        name: Refused("is not a field of messages", (False,))
        for name in {*ChatRequest.__struct_fields__} - _SERVED - _CALLED.keys() - {"stream_options"}
    },
    **{name: Refused(f"is called {here} in messages", ()) for name, here in _CALLED.items()},
    "mcp_servers": Refused("is not supported: the client runs the tools", ()),
    "container": Refused("is not supported: the client runs the tools", ()),
}
_NAMES = (
    (re.compile(r"max_completion_tokens"), "max_tokens"),
    (re.compile(r"response_format\.json_schema\.schema"), "output_config.format.schema"),
    (re.compile(r"response_format"), "output_config.format"),
    (re.compile(r"\bstop\b"), "stop_sequences"),
    (re.compile(r"\.function\.parameters\b"), ".input_schema"),
    (re.compile(r"\.function\.name\b"), ".name"),
)


def read_request(body: bytes) -> MessagesRequest:
    """Raises `RequestError`."""
    return decode_body(body, MessagesRequest, served=_SERVED, also=REFUSED)


def read_count(body: bytes) -> CountTokensRequest:
    """Ignores fields of messages only, since clients send one body to both. Raises `RequestError`."""
    return decode_body(body, CountTokensRequest, served=_SERVED, also=REFUSED)


def to_chat(request: CountTokensRequest, model: ServedModel) -> ChatRequest:
    """Raises `RequestError` with the field's name."""
    tools = tools_in_effect(request.tools or (), changes_of(request.messages))
    messages, goes_on = messages_of(request.system, request.messages, model.tokenizer)
    choice, config = request.tool_choice, request.output_config
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        reasoning_effort=None if config is None else config.effort,
        response_format=_response_format(config),
        chat_template_kwargs=_variables(request, model),
        continue_final_message=goes_on,
        add_generation_prompt=not goes_on,
    )
    if isinstance(request, MessagesRequest):
        chat.max_completion_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.stream, chat.cache_salt, chat.kv_mode = request.stream, request.cache_salt, request.kv_mode
    return chat


def rename_field(error: RequestError) -> RequestError:
    """Name the message's field in a refusal of a chat's field."""
    text, param = str(error), error.param
    if param is None:
        return error
    name = param
    for pattern, here in _NAMES:
        name = pattern.sub(here, name)
    return type(error)(text.replace(param, name), name)


def _variables(request: CountTokensRequest, model: ServedModel) -> dict[str, Any] | None:
    """Adds `enable_thinking` if the template has it and the request sets it."""
    given, thinking = request.chat_template_kwargs, request.thinking
    if (
        thinking is None
        or thinking.type in ("adaptive", "between_tools")
        or _THINKING not in model.tokenizer.template_variables
    ):
        return given
    return {_THINKING: thinking.type == "enabled", **(given or {})}


def _response_format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=config.format.schema))


def _tool_choice(choice: AnthropicToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "any":
        return "required"
    if choice.type != "tool":
        return choice.type
    if choice.name is None:
        raise RequestError("tool_choice.name is required if tool_choice.type is tool", "tool_choice.name")
    return NamedChoice(function=FunctionName(name=choice.name))

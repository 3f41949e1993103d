"""Turns the `input` of a request into chat messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from baton.errors import RequestError
from baton.openai.conversation import MAX_MESSAGES
from baton.openai.requests import ChatMessage, ContentPart
from baton.openai.responses.tools import CalledName, custom_arguments
from baton.openai.tools import CalledFunction, ToolCall

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = tuple(f"{kind}_output" for kind in _CALLS)
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class InputItem(msgspec.Struct, kw_only=True):
    """A message (the default `type`), a call of a function or custom tool, its output, or reasoning. Items of earlier
    responses are accepted unchanged."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


def messages_of(instructions: str | None, given: str | list[InputItem]) -> list[ChatMessage]:
    """Joins successive reasoning, text and calls of the assistant into one message. Raises `RequestError` with the
    item's name.
    """
    messages = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    if isinstance(given, str):
        return [*messages, ChatMessage(role="user", content=given)]
    # Checked first: a body of permitted size may have too many items.
    if len(given) > MAX_MESSAGES:
        raise RequestError(f"input must be at most {MAX_MESSAGES} items", "input")
    calls = {(item.type, item.call_id) for item in given if item.type in _CALLS}
    for index, item in enumerate(given):
        kind = item.type.removesuffix("_output")
        if item.type in _OUTPUTS and (kind, item.call_id) not in calls:
            raise RequestError(f"input[{index}].call_id is that of no {kind}", f"input[{index}].call_id")
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[ChatMessage], item: InputItem, field: str) -> None:
    if item.type == "message":
        if item.role is None:
            raise RequestError(f"{field}.role is needed", f"{field}.role")
        if item.content is None:
            raise RequestError(f"{field}.content is needed", f"{field}.content")
        if item.role != "assistant":
            messages.append(ChatMessage(role=item.role, content=_parts(item.content, f"{field}.content")))
            return
        message = _assistant(messages, begins=lambda last: last.content is not None or bool(last.tool_calls))
        message.content = _text(item.content, f"{field}.content")
    elif item.type in _CALLS:
        if item.name is None or item.call_id is None:
            raise RequestError(f"{field}: a {item.type} needs name and call_id", field)
        name = CalledName(item.name, item.namespace).flat
        arguments = custom_arguments(item.input or "") if item.type == "custom_tool_call" else item.arguments
        call = ToolCall(id=item.call_id, function=CalledFunction(name=name, arguments=arguments))
        message = _assistant(messages, begins=lambda last: False)
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(call)
    elif item.type in _OUTPUTS:
        if item.call_id is None:
            raise RequestError(f"{field}.call_id is needed", f"{field}.call_id")
        output = _parts(item.output, f"{field}.output")
        messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=output))
    elif item.type == "reasoning":
        if item.encrypted_content is not None:
            raise RequestError(f"{field}.encrypted_content is not supported", f"{field}.encrypted_content")
        text = _text(item.content or item.summary or "", f"{field}.content")
        if text:
            _assistant(messages, begins=lambda last: True).reasoning_content = text
    else:
        raise RequestError(f"{field}: items of type {item.type!r} are not supported", f"{field}.type")


def _assistant(messages: list[ChatMessage], begins: Callable[[ChatMessage], bool]) -> ChatMessage:
    """The last message, or a new one if `begins` or after another role."""
    if not messages or messages[-1].role != "assistant" or begins(messages[-1]):
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _text(content: str | list[ContentPart] | None, field: str) -> str:
    """One text, of all parts of a model's answer."""
    parts = _parts(content, field)
    return parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)


def _parts(content: str | list[ContentPart] | None, field: str) -> str | list[ContentPart]:
    """Content of other roles; the chat template's format decides how it is shown, as in chats."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXTS or part.text is None:
            raise RequestError(f"{field}: parts of type {part.type!r} are not supported, only text", field)
    return [ContentPart(type="text", text=part.text) for part in content]

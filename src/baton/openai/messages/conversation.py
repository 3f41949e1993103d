"""Turns `system` and `messages` of a request into chat messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from baton.errors import RequestError
from baton.openai.conversation import MAX_MESSAGES
from baton.openai.messages.tools import CHANGES, ToolChange
from baton.openai.requests import ChatMessage, ContentPart
from baton.openai.tools import CalledFunction, ToolCall
from baton.text import Tokenizer

# Claude Code's system prompts begin with this text and a number that always differs.
_BILLING = "x-anthropic-billing-header"
_PROBE = [{"role": role, "content": "a"} for role in ("system", "user", "system", "user")]


class ResultPart(msgspec.Struct, kw_only=True):
    """Text, or the name of a tool found by a search."""

    type: str
    text: str | None = None
    tool_name: str | None = None


class Block(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    tool: ToolChange | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def messages_of(
    system: str | list[Block] | None, given: Sequence[InputMessage], tokenizer: Tokenizer
) -> tuple[list[ChatMessage], bool]:
    """The chat messages, and whether the model must continue the last one, an assistant message.

    Later system messages join the first if the template accepts none elsewhere. Raises `RequestError` with the block's
    name.
    """
    if not given:
        raise RequestError("messages must not be empty", "messages")
    if len(given) > MAX_MESSAGES:
        raise RequestError(f"messages must be at most {MAX_MESSAGES} messages", "messages")
    lead = [] if system is None else [_system(system, "system")]
    merges = any(message.role == "system" for message in given) and not _takes_system_anywhere(tokenizer)
    messages: list[ChatMessage] = []
    calls: set[str] = set()
    for index, message in enumerate(given):
        field = f"messages[{index}].content"
        if message.role == "system":
            text = _system(_without_changes(message.content), field)
            if merges:
                lead.append(text)
            elif text:
                messages.append(ChatMessage(role="system", content=text))
        elif isinstance(message.content, str):
            messages.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "user":
            _add_user(messages, message.content, calls, field)
        else:
            messages.append(_assistant(message.content, calls, field))
    if text := "".join(lead):
        messages.insert(0, ChatMessage(role="system", content=text))
    last = messages[-1] if messages else None
    return messages, last is not None and last.role == "assistant" and not last.tool_calls


def changes_of(given: Sequence[InputMessage]) -> Iterator[tuple[str, Block]]:
    """The changes of tools, each with its block's name."""
    for index, message in enumerate(given):
        if message.role == "system" and not isinstance(message.content, str):
            for number, block in enumerate(message.content):
                if block.type in CHANGES:
                    yield f"messages[{index}].content[{number}]", block


def _without_changes(content: str | list[Block]) -> str | list[Block]:
    return content if isinstance(content, str) else [block for block in content if block.type not in CHANGES]


def _takes_system_anywhere(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.apply_chat_template(_PROBE)
    except RequestError:
        return False
    return True


def _system(content: str | list[Block], field: str) -> str:
    texts = [content] if isinstance(content, str) else [_text(block, field) for block in content]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _add_user(messages: list[ChatMessage], blocks: list[Block], calls: set[str], field: str) -> None:
    """Puts tool results first, as separate messages."""
    parts: list[ContentPart] = []
    for index, block in enumerate(blocks):
        name = f"{field}[{index}]"
        if block.type != "tool_result":
            parts.append(ContentPart(type="text", text=_text(block, name)))
            continue
        if block.tool_use_id not in calls:
            raise RequestError(f"{name}.tool_use_id is that of no tool_use", f"{name}.tool_use_id")
        content = block.content or ""
        if not isinstance(content, str):
            content = "\n".join(_result_text(part, f"{name}.content") for part in content)
        messages.append(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
    if parts:
        messages.append(ChatMessage(role="user", content=parts))


def _assistant(blocks: list[Block], calls: set[str], field: str) -> ChatMessage:
    parts: list[ContentPart] = []
    reasoning: list[str] = []
    tool_calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        name = f"{field}[{index}]"
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            if not block.id or not block.name:
                raise RequestError(f"{name} needs id and name", name)
            calls.add(block.id)
            tool_calls.append(
                ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=block.input or {}))
            )
        elif block.type != "redacted_thinking":  # only Anthropic can read it
            parts.append(ContentPart(type="text", text=_text(block, name)))
    return ChatMessage(
        role="assistant",
        content=parts or None,
        reasoning_content="".join(reasoning) or None,
        tool_calls=tool_calls or None,
    )


def _result_text(part: ResultPart, field: str) -> str:
    text = part.tool_name if part.type == "tool_reference" else part.text if part.type == "text" else None
    if text is None:
        raise _unsupported(part.type, field)
    return text


def _text(block: Block, field: str) -> str:
    if block.type != "text" or block.text is None:
        raise _unsupported(block.type, field)
    return block.text


def _unsupported(kind: str, field: str) -> RequestError:
    return RequestError(f"{field}: blocks of type {kind!r} are not supported here, only text", field)

"""Turns a chat's messages and tools into prompt tokens, with the model's chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.requests import ChatMessage, ChatRequest, TokenizeRequest
from baton.wire import PromptIds

MAX_MESSAGES = 4096
# Marks the end of the message that the model continues. The space shows whether the template trims messages.
_END = "<|baton-end-of-message|> "

# Templates may loop over parts, in interpreted code.
_MAX_PARTS = 4 * MAX_MESSAGES
# Types of a message's parts that are text, as in vLLM, with the field that holds it.
_TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), "text")
_TEXT_PARTS |= {"refusal": "refusal", "thinking": "thinking"}


def chat_text(
    request: ChatRequest | TokenizeRequest,
    messages: list[ChatMessage],
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    model: ServedModel,
) -> str:
    """The rendered chat template. Raises `RequestError` for unsupported content."""
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages must be at most {MAX_MESSAGES} messages", "messages")
    if sum(len(message.content) for message in messages if isinstance(message.content, list)) > _MAX_PARTS:
        raise RequestError(f"messages must have at most {_MAX_PARTS} content parts", "messages")
    shown = [_message(index, message) for index, message in enumerate(messages)]
    # Before the template runs: its time grows with the messages.
    check_num_chars(sum(map(_message_chars, shown)), "messages", model)
    check_num_chars(_num_chars(tools or ""), "tools", model)
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if goes_on:
        _add_end(shown[-1])
    begins = not goes_on and request.add_generation_prompt is not False
    text = model.tokenizer.apply_chat_template(shown, begins, variables, tools)
    return _until_end(text) if goes_on else text


def chat_prompt(text: str, request: ChatRequest | TokenizeRequest, model: ServedModel) -> PromptIds:
    """Tokenise the result of `chat_text`. Raises `RequestError` if it is too long."""
    # The template has already written BOS.
    return encode_text(text, model, request.add_special_tokens is True, "messages")


def encode_text(text: str, model: ServedModel, special: bool, param: str) -> PromptIds:
    check_num_chars(len(text), param, model)
    return PromptIds(model.tokenizer.encode(text, special))


def check_num_chars(num_chars: int, param: str, model: ServedModel) -> None:
    """Raises `RequestError` for text that cannot fit; does not tokenise."""
    limit = model.max_model_len * model.tokenizer.max_token_chars
    if num_chars > limit:
        raise RequestError(
            f"{param} has {num_chars} characters, and this model's context of {model.max_model_len} tokens holds "
            f"at most {limit}",
            param,
        )


def _message_chars(message: dict[str, Any]) -> int:
    parts = message["content"] if isinstance(message["content"], list) else []
    rest = (value for name, value in message.items() if name != "content" or not parts)
    return sum(len(part["text"]) for part in parts) + sum(map(_num_chars, rest))


def _num_chars(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))


def _add_end(message: dict[str, Any]) -> None:
    if message["content"] and isinstance(message["content"], list):
        message["content"][-1]["text"] += _END
    else:
        message["content"] = (message["content"] or "") + _END


def _until_end(text: str) -> str:
    """A rendered conversation up to `_END`, without trailing spaces if the template trims messages."""
    end = text.rfind(_END.strip())
    if end < 0:
        what = "continue_final_message"
        raise RequestError(f"{what}: the chat template does not show the end of the last message", what)
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    param = f"messages[{index}].content"
    for name in ("function_call", "audio", "refusal", "tools"):
        if getattr(message, name):
            raise RequestError(f"{name} is not supported in a message", f"messages[{index}].{name}")
    content: Any = message.content
    if isinstance(content, list):
        texts = [getattr(part, _TEXT_PARTS.get(part.type, ""), None) for part in content]
        if None in texts:
            kind = content[texts.index(None)].type
            raise RequestError(f"content parts of type {kind!r} are not supported, only text", param)
        content = [{"type": "text", "text": text} for text in texts]
    out: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError("tool_calls are in messages of the assistant", f"messages[{index}].tool_calls")
        out["tool_calls"] = [call.for_template() for call in message.tool_calls]
    return out

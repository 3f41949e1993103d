"""vLLM's `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.conversation import chat_prompt, chat_text, encode_text
from baton.openai.plan import check_model
from baton.openai.requests import DetokenizeRequest, TokenizeRequest, decode_body
from baton.openai.tools import CheckedTools
from baton.text import Tokenizer

_ANY_LENGTH = 2**24


def tokenize(body: bytes, model: ServedModel) -> dict[str, object]:
    """The token ids of a text or chat, as a completion or chat would get them, and their number.

    Raises `RequestError`.
    """
    request = decode_body(body, TokenizeRequest)
    check_model(request.model, model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("exactly one of prompt and messages is needed", "prompt")
    if request.messages is not None:
        tools, variables = (
            CheckedTools.of(request.tools, None, None).for_template(),
            dict(request.chat_template_kwargs or {}),
        )
        ids = list(chat_prompt(chat_text(request, request.messages, variables, tools, model), request, model))
    else:
        ids = list(encode_text(request.prompt or "", model, request.add_special_tokens is not False, "prompt"))
    strings = [model.tokenizer.token(token) for token in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings}


def chat_tokens(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    tokenizer: Tokenizer,
) -> list[int]:
    """The token ids of a chat on a server with this tokenizer. Raises `RequestError`."""
    fields = {"messages": messages, "tools": tools, "chat_template_kwargs": chat_template_kwargs}
    model = ServedModel("", tokenizer, _ANY_LENGTH, tokenizer.vocab_size, 0)
    ids = tokenize(msgspec.json.encode(fields), model)["tokens"]
    assert isinstance(ids, list)
    return ids


def detokenize(body: bytes, model: ServedModel) -> dict[str, object]:
    """The text, special tokens included. Raises `RequestError`."""
    request = decode_body(body, DetokenizeRequest)
    check_model(request.model, model)
    if not all(0 <= token < model.vocab_size for token in request.tokens):
        raise RequestError(f"tokens must be in [0, {model.vocab_size})", "tokens")
    return {"prompt": model.tokenizer.decode(request.tokens, skip_special_tokens=False)}

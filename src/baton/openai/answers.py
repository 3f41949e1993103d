"""Responses of OpenAI-compatible servers, written and read."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from baton.errors import ProtocolError, RequestError
from baton.sampling_params import TokenId
from baton.wire import NumDrafts

_MAX_MESSAGE = 300
_TOKEN = "token_id:"
T = TypeVar("T")


class Model(msgspec.Struct, frozen=True):
    """An entry of `GET /v1/models`. `root`: the checkpoint; `parent`: the model of an adapter (vLLM)."""

    id: str
    owned_by: str | None = None
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Models(msgspec.Struct, frozen=True):
    """`GET /v1/models`: the model, then its adapters."""

    data: list[Model]


class SpecDecode(msgspec.Struct, frozen=True):
    """Baton's extension: accepted drafts per verification."""

    accepted: list[NumDrafts]
    num_speculative_tokens: NumDrafts


class Logprobs(msgspec.Struct, frozen=True):
    """With `return_tokens_as_token_ids`, tokens are named `token_id:N`."""

    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    tokens: list[str] | None = None
    text_offset: list[int] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a completion, or a part of it in a stream."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    spec_decode: SpecDecode | None = None
    text: str | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Details are only written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int | None = None
    prompt_tokens_details: Any = None
    completion_tokens_details: Any = None


class Completion(msgspec.Struct, frozen=True):
    """A completion, or one event of a stream. Made from a chat, it has `prompt_token_ids`. `metrics`: vLLM's."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[TokenId] | None = None
    metrics: Any = None


class _ScoredToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    top_logprobs: list[_ScoredToken] = []


class _ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[_ScoredToken] | None = None

    def of_completion(self) -> Logprobs | None:
        if self.content is None:
            return None
        top: list[dict[str, float] | None] = [
            {other.token: other.logprob for other in one.top_logprobs} | {one.token: one.logprob}
            for one in self.content
        ]
        return Logprobs([one.logprob for one in self.content], top, [one.token for one in self.content])


class _ChatChoice(msgspec.Struct, frozen=True):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _ChatLogprobs | None = None
    spec_decode: SpecDecode | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """A response without messages: token ids are more precise than text."""

    choices: list[_ChatChoice] = []
    usage: Usage | None = None
    prompt_token_ids: list[TokenId] | None = None

    def of_completion(self) -> Completion:
        choices = [
            Choice(
                one.token_ids,
                one.finish_reason,
                one.stop_reason,
                None if one.logprobs is None else one.logprobs.of_completion(),
                one.spec_decode,
            )
            for one in self.choices
        ]
        return Completion(choices, self.usage, prompt_token_ids=self.prompt_token_ids)


class ErrorFields(msgspec.Struct, frozen=True):
    message: str | None = None
    param: str | None = None
    code: Any = None


class _Error(msgspec.Struct, frozen=True):
    error: ErrorFields


def decode_answer(body: bytes, kind: type[T], problem: str = "the answer is malformed") -> T:
    """Raises `ProtocolError` with `problem`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{problem}: {printable_line(str(error))}") from None


def read_error(body: bytes) -> ErrorFields:
    """Empty if the body does not have OpenAI's shape."""
    try:
        return msgspec.json.decode(body, type=_Error).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ErrorFields()


def refusal_in(error: dict[str, Any]) -> RequestError | None:
    """None if the request is not at fault."""
    param = error.get("param")
    if error.get("code") != 400:
        return None
    return RequestError(str(error.get("message")), param if isinstance(param, str) else None)


def answer_token_ids(choice: Choice) -> list[int]:
    """`token_ids`, else the ids in the logprobs. Raises `ProtocolError`."""
    if choice.token_ids is not None:
        return choice.token_ids
    if choice.logprobs is not None and choice.logprobs.tokens is not None:
        ids = [token_id(name) for name in choice.logprobs.tokens]
        if all(i is not None for i in ids):
            return [i for i in ids if i is not None]
    raise ProtocolError(
        "the server does not tell token ids: it knows neither return_token_ids (vLLM from 0.10, Baton) "
        "nor return_tokens_as_token_ids"
    )


def token_id(name: str) -> int | None:
    """N of `token_id:N`; None for a token named by its text."""
    digits = name.removeprefix(_TOKEN)
    return int(digits) if digits != name and digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def printable_line(text: str) -> str:
    """One line without control characters, cut to `_MAX_MESSAGE` characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: _MAX_MESSAGE + 1])
    return line if len(text) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]} ..."

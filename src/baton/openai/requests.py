"""Request bodies of the OpenAI API, and their `SamplingParams`. All other fields: see `refused_fields`."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from baton.errors import RequestError
from baton.openai.http.caller import note_user
from baton.openai.refused_fields import NOTHING_ELSE, Refused, is_empty, refuse_unserved
from baton.openai.structured import ResponseFormat, StructuredOutputs, structured_params
from baton.openai.tools import NO_TOOLS, CheckedTools, Tool, ToolCall, ToolChoice
from baton.sampling_params import (
    MAX_LOGPROBS,
    NO_DEFAULTS,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputsParams,
    seed_word,
)
from baton.wire import Mode, Priority, check_salt

_PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`\Z")
_MISSING = re.compile(r"required field `([^`]+)`")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F]"
_UNPAIRED_SURROGATE = re.compile(f"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}".encode())


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`. `include_obfuscation` has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of completions, chats and responses. All default to None: clients send null."""

    model: str | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_mode: Mode | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    structured_outputs: StructuredOutputs | None = None


class _Completing(CommonFields, kw_only=True):
    n: int | None = None
    max_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None


class CompletionRequest(_Completing, kw_only=True):
    """Body of `POST /v1/completions`. `logprobs`: alternatives per token."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message or of a response's item; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """An entry of `messages`. `reasoning` is another name of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    # Refused:
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None
    tools: list[Any] | None = None


class ChatRequest(_Completing, kw_only=True):
    """Body of `POST /v1/chat/completions`. `top_logprobs`: alternatives per token, if `logprobs`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of vLLM's `POST /tokenize`: a `prompt`, or `messages` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


B = TypeVar("B", bound=msgspec.Struct)
R = TypeVar("R", CompletionRequest, ChatRequest)
# Sampling parameters passed on unchanged, with the defaults of `SamplingParams`.
_AS_ASKED = (
    *("min_tokens", "n", "temperature", "top_p", "min_p", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)


def decode_body(
    body: bytes, kind: type[B], served: Collection[str] = (), also: Mapping[str, Refused] = NOTHING_ELSE
) -> B:
    """`served`: fields that this endpoint supports although others refuse them; `also`: more fields to refuse.

    Raises `RequestError`.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        note_user(fields)
        refuse_unserved(fields, also, served)
        nests = b"[" in body or body.count(b"{") > 1
        if nests and (empty := {name for name, raw in fields.items() if is_empty(raw) and name not in _required(kind)}):
            body = msgspec.json.encode({name: raw for name, raw in fields.items() if name not in empty})
        # As in vLLM, 16.0 (from clients without integers) and "16" count as 16.
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        missing = _MISSING.search(message)
        param = path.group(2) if path else missing.group(1) if missing else None
        what = "a key: " if path and path.group(1) else ""
        raise RequestError(f"{param or 'body'}: {what}{_PATH.sub('', message)}", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body:
            raise RequestError("the request body is empty") from None
        hint = (
            "; no text may contain an unpaired surrogate, such as \\ud800" if _UNPAIRED_SURROGATE.search(body) else ""
        )
        raise RequestError(f"the request body is not valid JSON: {error}{hint}") from None


@functools.cache
def _required(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.required)


def decode_request(body: bytes, kind: type[R]) -> R:
    return check_request(decode_body(body, kind))


def check_request(request: R) -> R:
    """Raises `RequestError`."""
    check_salt(request.cache_salt)
    for name in ("echo", "prompt_logprobs"):
        if request.stream and getattr(request, name) not in (None, False):
            raise RequestError(f"{name} is not for streams", name)
    # In vLLM, a chat's `echo` puts the last message before the response.
    if isinstance(request, ChatRequest) and request.echo:
        raise RequestError("echo is for completions, not for chats", "echo")
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    return request


def sampling_params(
    request: CompletionRequest | ChatRequest,
    max_tokens: int,
    logprobs: int | None,
    grammar: StructuredOutputsParams | None,
    vocab_size: int,
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> SamplingParams:
    """`defaults`: of parameters that the request omits.

    Raises `RequestError` with the parameter's name.
    """
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    values = {name: getattr(request, name) for name in _AS_ASKED}
    given = {**defaults.given(), **{name: value for name, value in values.items() if value is not None}}
    top_k = given.pop("top_k", 0)
    return SamplingParams(
        max_tokens=max_tokens,
        # Larger values mean the same, and could overflow in the engine.
        top_k=min(top_k if request.top_k is None else request.top_k, vocab_size),
        logit_bias=request.logit_bias or None,
        allowed_token_ids=tuple(request.allowed_token_ids or ()) or None,
        bad_words=tuple(request.bad_words or ()),
        seed=seed_word(request.seed),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(request, max_tokens),
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        structured_outputs=grammar,
        **given,
    ).check(vocab_size)


def _prompt_logprobs(request: CompletionRequest | ChatRequest, max_tokens: int) -> int | None:
    """Alternatives per prompt token; None: no prompt logprobs."""
    count, echoes = request.prompt_logprobs, isinstance(request, CompletionRequest) and request.echo
    if echoes and request.logprobs is not None and not isinstance(request.logprobs, bool):
        count = max(count or 0, request.logprobs)
    # With max_tokens 0, the echo is the response.
    return 0 if count is None and echoes and max_tokens == 0 else count


def grammar_of(
    request: CompletionRequest | ChatRequest, tools: CheckedTools = NO_TOOLS
) -> tuple[StructuredOutputsParams | None, str]:
    """The grammar, if any, and the request field with it. As in vLLM, a required tool call overrides other constraints.

    Raises `RequestError` with the field's name.
    """
    forced = tools.grammar()
    if forced is not None:
        return forced, "tools"
    return structured_params(request.response_format, request.structured_outputs)


def chat_logprobs(request: ChatRequest) -> int | None:
    """Alternatives per token; None: no logprobs."""
    top = request.top_logprobs
    if top is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be 0 to {MAX_LOGPROBS}, got {top}", "top_logprobs")
    return (top or 0) if request.logprobs else None

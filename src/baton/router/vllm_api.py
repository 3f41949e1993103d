"""vLLM's completions API in plain data: what is sent, and what comes back as chunks."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from baton.wire import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenId, TokenLogprobs

# vLLM's seeds are signed.
_SEED_BITS = 63
# Far above the samples of one prompt: the noise of a sample is not another's at a later position.
_SEED_STRIDE = 2**32
_TOKEN = "token_id:"


class Model(msgspec.Struct, frozen=True):
    """An entry of `GET /v1/models`; `root` is the checkpoint."""

    id: str
    root: str
    max_model_len: int


class Models(msgspec.Struct, frozen=True):
    """`GET /v1/models`: the model first, then its adapters, of which less is said."""

    data: list[msgspec.Raw]


class Logprobs(msgspec.Struct, frozen=True):
    """Logprobs of a choice, by token."""

    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class Choice(msgspec.Struct, frozen=True):
    """One choice, whole or a piece of it."""

    token_ids: list[TokenId] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class Completion(msgspec.Struct, frozen=True):
    """A response, or one event of a streamed one."""

    choices: list[Choice] = []
    error: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


def completion_body(
    request: GenerateRequest,
    model: str,
    num_sent: int,
    kv_transfer_params: dict[str, object] | None,
    first_only: bool,
    stream: bool,
) -> dict[str, Any]:
    """A leg as vLLM's completion request. `num_sent` output tokens are in the prompt already; `first_only`: the leg is
    to sample one token.
    """
    params = request.sampling_params
    left = 1 if first_only else params.max_tokens - num_sent
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_token_ids,
        "request_id": request.request_id,
        "max_tokens": left,
        "min_tokens": min(max(params.min_tokens - num_sent, 0), left),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "return_token_ids": True,
    }
    if params.seed is not None:
        # Samples of one prompt differ; both legs of a sample do not. A server starts its noise anew with each request,
        # and what follows known tokens must not repeat theirs.
        body["seed"] = (params.seed + params.sample_index + num_sent * _SEED_STRIDE) % 2**_SEED_BITS
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return body


def to_chunk(request: GenerateRequest, choice: Choice, position: int) -> TokenChunk:
    """A choice, or a piece of one, whose first token is the request's output token `position`.

    Raises `ValueError` for logprobs that do not fit the tokens.
    """
    tokens = choice.token_ids or []
    logprobs = None
    if choice.logprobs is not None and tokens:
        num_top = request.sampling_params.logprobs or 0
        own, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        logprobs = [TokenLogprobs(p or 0.0, _top(t)[:num_top]) for p, t in zip(own, top, strict=True)]
    error = "engine_error: the engine ended the request" if choice.finish_reason == "error" else None
    return TokenChunk(
        request_id=request.request_id,
        token_ids=tokens,
        position=position if tokens else None,
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
        error=error,
        recoverable=error is not None,
    )


def can_resume(params: SamplingParams) -> bool:
    """Whether a vLLM server that is sent output tokens as a prompt goes on as one that made them itself would: it
    counts presence and frequency over its own output alone.
    """
    return params.presence_penalty == 0.0 and params.frequency_penalty == 0.0


def read_metrics(text: str) -> dict[str, list[float]]:
    """vLLM's own samples of `GET /metrics` by name, one for each set of labels; those that are no numbers left out.

    Raises `ValueError` for what are no metrics.
    """
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:") and math.isfinite(number := float(value)):
            found.setdefault(name.partition("{")[0], []).append(number)
    return found


def _top(found: dict[str, float] | None) -> list[tuple[int, float]]:
    # vLLM adds the token that was chosen, if it is not among the best.
    pairs = [(int(name.removeprefix(_TOKEN)), value) for name, value in (found or {}).items()]
    return sorted(pairs, key=lambda pair: -pair[1])

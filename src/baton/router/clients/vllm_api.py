"""vLLM's completions API: a leg's request body, and its response as chunks."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from baton.openai.answers import Choice, token_id
from baton.sampling_params import SamplingDefaults, SamplingParams, signed_word
from baton.wire import FinishReason, GenerateRequest, LegTimings, NumDrafts, TokenChunk, TokenLogprobs, encoded_once

_REASONS = get_args(FinishReason)
# On CPUs PyTorch uses the lower 32 bits of a seed.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class _RenderedParams(msgspec.Struct):
    """Neutral values, which vLLM omits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16


class _Rendered(msgspec.Struct):
    """An element of the answer of `/v1/completions/render`: vLLM's `GenerateRequest`."""

    sampling_params: _RenderedParams


class _Verifications(msgspec.Struct):
    """Reported with `--per-request-spec-decode-metrics detailed`."""

    per_step_accepted: list[NumDrafts] = []
    per_step_drafted: list[NumDrafts] = []


class _Metrics(msgspec.Struct):
    """Times with `--enable-per-request-metrics`; the time to the first token begins with the first forward."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    speculative_decoding: _Verifications | None = None


def completion_body(
    request: GenerateRequest,
    model: str,
    num_sent: int,
    kv_transfer_params: dict[str, object] | None,
    first_only: bool,
    stream: bool,
) -> dict[str, Any]:
    """The prompt ends with `num_sent` output tokens. `first_only`: sample one token."""
    params = request.sampling_params
    left = 1 if first_only else params.max_tokens - num_sent
    body: dict[str, Any] = {
        "model": model,
        "prompt": encoded_once(request.prompt_token_ids),
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
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "return_token_ids": True,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}  # its event has the metrics
    if params.seed is not None:
        body["seed"] = _seed(params.seed, params.sample_index, num_sent)
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body["return_tokens_as_token_ids"] = True
    for name, value in (
        ("cache_salt", request.cache_salt),
        ("allowed_token_ids", params.allowed_token_ids),
        ("bad_words", list(params.bad_words) or None),
        ("structured_outputs", params.structured_outputs),
        ("logprobs", params.logprobs),
        ("kv_transfer_params", kv_transfer_params),
    ):
        if value is not None:
            body[name] = value
    return body


def _seed(seed: int, sample_index: int, num_sent: int) -> int:
    """Equal in both legs. vLLM starts each request's noise from its seed: a resumed request must not repeat the noise
    of tokens already sent."""
    own = signed_word(seed + sample_index + num_sent * _SEED_STRIDE)
    return own if own != -1 else 2**63 - 1  # -1 means no seed


def render_bodies(model: str, max_model_len: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Their answers show the server's sampling defaults. One sets nothing. The other sets a temperature, without which
    vLLM resets top_p, top_k and min_p, and more tokens than any request has.
    """
    common = {"model": model, "prompt": [0]}
    return common | {"max_tokens": None}, common | {"max_tokens": max_model_len, "temperature": 1.0}


def rendered_defaults(left: bytes, asked: bytes, max_model_len: int) -> SamplingDefaults:
    """A server's defaults, from its answers to `render_bodies`. Raises msgspec's errors."""
    ours, theirs = (msgspec.json.decode(body, type=list[_Rendered])[0].sampling_params for body in (left, asked))
    room = max_model_len - 1
    neutral = _RenderedParams()
    defaults = {name: getattr(theirs, name) for name in _RenderedParams.__struct_fields__}
    defaults["temperature"] = ours.temperature
    return SamplingDefaults(
        **{name: value for name, value in defaults.items() if name != "max_tokens" and value != getattr(neutral, name)},
        max_tokens=ours.max_tokens if ours.max_tokens < room else None,
        limit=theirs.max_tokens if theirs.max_tokens < room else None,
    )


def to_chunk(request: GenerateRequest, choice: Choice, position: int) -> TokenChunk:
    """`position`: the index in the output of the choice's first token.

    Raises `ValueError` if logprobs do not fit the tokens, or for an unknown finish reason.
    """
    tokens = choice.token_ids or []
    if choice.finish_reason not in (None, *_REASONS):
        raise ValueError("an unknown finish reason")
    reason = cast("FinishReason | None", choice.finish_reason)
    logprobs = None
    if choice.logprobs is not None and tokens:
        num_top = request.sampling_params.logprobs or 0
        own, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        logprobs = [TokenLogprobs(p or 0.0, _top(t)[:num_top]) for p, t in zip(own, top or (), strict=True)]
    error = "engine_error: the engine ended the request" if reason == "error" else None
    return TokenChunk(
        request_id=request.request_id,
        token_ids=tokens,
        position=position if tokens else None,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
        error=error,
        recoverable=error is not None,
    )


def with_metrics(request: GenerateRequest, last: TokenChunk, metrics: Any, is_padded: bool = False) -> TokenChunk:
    """A leg's last chunk with the server's `metrics`, if they can be read. `is_padded`: vLLM padded the first step with
    placeholders, and counts it as a verification.
    """
    if metrics is None:
        return last
    try:
        parsed = msgspec.convert(metrics, _Metrics)
    except msgspec.ValidationError:
        return last
    if parsed.speculative_decoding is not None:
        accepted, drafted = parsed.speculative_decoding.per_step_accepted, parsed.speculative_decoding.per_step_drafted
        if len(accepted) == len(drafted):
            skipped = int(is_padded)
            last = msgspec.structs.replace(last, accepted=accepted[skipped:], drafted=drafted[skipped:])
    if request.timings and parsed.queue_time_ms is not None and parsed.time_to_first_token_ms is not None:
        started = parsed.queue_time_ms / 1e3
        timings = LegTimings(started=started, sampled=started + parsed.time_to_first_token_ms / 1e3)
        last = msgspec.structs.replace(last, timings=timings)
    return last


def can_resume(params: SamplingParams) -> bool:
    """Whether vLLM can continue after output tokens in its prompt as after generated ones. Presence and frequency
    penalties and bad words see generated tokens only, and the grammar of structured outputs starts again.
    """
    counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return not counts and not params.bad_words and params.structured_outputs is None


def _top(found: dict[str, float] | None) -> list[tuple[int, float]]:
    # vLLM adds the chosen token if it is not among the best.
    pairs = []
    for name, value in (found or {}).items():
        token = token_id(name)
        if token is None:
            raise ValueError("logprobs of a token without its id")
        pairs.append((token, value))
    return sorted(pairs, key=lambda pair: -pair[1])

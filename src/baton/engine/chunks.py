"""The chunks in which an engine emits a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.clock import Clock
from baton.engine.request import Request
from baton.handoff.protocol.messages import Seeds
from baton.wire import FinishReason, LegTimings, TokenChunk, TokenLogprobs


def step_chunk(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    drafts: Sequence[int],
    stop_reason: int | None,
    clock: Clock,
) -> TokenChunk:
    """`token_ids` are already appended to the request. `drafts`: (proposed, accepted), or empty."""
    position = request.num_output - len(token_ids)
    chunk = TokenChunk(
        request_id=request.request_id,
        token_ids=token_ids,
        position=position,
        logprobs=logprobs,
        accepted=[min(drafts[1], len(token_ids))] if drafts else [],
        drafted=[drafts[0]] if drafts else [],
        finish_reason=request.finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached,
        queued_s=request.times.queued_s if position == 0 else None,
        timings=_timings(request, clock),
        prompt_logprobs=(request.prompt_logprobs or None) if position == 0 else None,
        handoff_error=request.handoff_error,
    )
    seed, request.seed, request.handoff_error = request.seed, None, None
    return chunk if seed is None else _with_seed(seed, chunk)


def seed_chunk(
    request: Request, seeds: Seeds, reason: FinishReason | None, stop_reason: int | None, clock: Clock
) -> TokenChunk:
    """The first token of a handoff, from D too: P may have died before its client received it."""
    return TokenChunk(
        request_id=request.request_id,
        token_ids=[seeds.first_token],
        position=0,
        logprobs=[seeds.first_logprobs] if seeds.first_logprobs is not None else None,
        finish_reason=reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached,
        timings=_timings(request, clock),
    )


def _with_seed(seed: TokenChunk, chunk: TokenChunk) -> TokenChunk:
    """The first step's chunk with the first token too: a message for it would delay that step on a shared host."""
    logprobs = None if chunk.logprobs is None else [*(seed.logprobs or ()), *chunk.logprobs]
    return msgspec.structs.replace(
        chunk, token_ids=seed.token_ids + chunk.token_ids, position=0, logprobs=logprobs, timings=seed.timings
    )


def _timings(request: Request, clock: Clock) -> LegTimings | None:
    return request.times.leg_timings(clock.monotonic()) if request.times.wanted else None

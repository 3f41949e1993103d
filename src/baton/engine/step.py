"""What one step computes for its rows: target forward, sampled tokens, drafts. A request that makes it fail ends alone.

Nothing of a request changes before its tokens are chosen, so rows that fail together are simply run again, one request
at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.engine.request import Request
from baton.engine.runner import DraftRows, TargetOutput
from baton.engine.sampler import SamplerState, token_logprobs
from baton.engine.scheduler import ScheduledRows
from baton.engine.stopping import until_stop
from baton.engine.verifier import Verified, verify_greedy
from baton.errors import CapacityError
from baton.wire import GenerateRequest, SamplingParams, TokenChunk, TokenLogprobs

if TYPE_CHECKING:
    from baton.engine.core import EngineCore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed: the drafter's rows, and the requests that could not be computed, with the cause."""

    draft_rows: list[DraftRows] = field(default_factory=list)
    failed: dict[Request, Exception] = field(default_factory=dict)


def compute(core: EngineCore, scheduled: Sequence[ScheduledRows]) -> Computed:
    """Run the rows, and send the tokens they give to their clients.

    Raises what the rows of every request raise, where a harmless request of the engine's own raises too: then it is
    the engine that is broken.
    """
    computed = _together(core, scheduled)
    if len(computed.failed) == len(scheduled) and not _works(core):
        raise next(iter(computed.failed.values()))
    return computed


def _together(core: EngineCore, scheduled: Sequence[ScheduledRows]) -> Computed:
    try:
        output = core.runner.forward(scheduled)
        sampling, logit_rows = _rows_to_sample(scheduled, output)
        logits = core.runner.logits(output, logit_rows) if sampling else None
        greedy: list[int] = [] if logits is None else logits.argmax(dim=-1).tolist()
        on_host = logits is not None and not all(rows.request.sampler.plain_greedy for rows, _ in sampling)
        host: npt.NDArray[np.float32] | None = logits.cpu().numpy() if logits is not None and on_host else None
    except Exception as error:
        if len(scheduled) == 1:
            return Computed(failed={scheduled[0].request: error})
        log.warning("a step of %d requests failed, each is run alone: %r", len(scheduled), error)
        return _joined([_together(core, [rows]) for rows in scheduled])
    failed: dict[Request, Exception] = {}
    for rows, first in sampling:
        try:
            _choose(core, rows.request, greedy, host, first)
        except Exception as error:
            failed[rows.request] = error
    draft_rows = _advance(core, [rows for rows in scheduled if rows.request not in failed], output)
    failed |= _propose(core, output, draft_rows)
    return Computed([drafted for drafted in draft_rows if drafted.request not in failed], failed)


def _joined(parts: Sequence[Computed]) -> Computed:
    whole = Computed()
    for part in parts:
        whole.draft_rows.extend(part.draft_rows)
        whole.failed.update(part.failed)
    return whole


def _works(core: EngineCore) -> bool:
    """Whether target and drafter can compute one token, in pages of their own; yes where none is free to try it."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    wire = GenerateRequest(request_id="canary", prompt_token_ids=[0, 0], sampling_params=params)
    request = Request(wire, SamplerState(params, [0, 0], core.runner.model.vocab_size, ()))
    try:
        for group, pool in core.cache.pools.items():
            request.kv.set_pages(group, pool.allocate(1))
        output = core.runner.forward([ScheduledRows(request, 0, 1)])
        core.runner.logits(output, [0])
        core.runner.propose(output, [DraftRows(request, 0, 0, 1, 1)])
    except CapacityError:
        return True
    except Exception:
        return False
    finally:
        core.scheduler.release(request)
    return True


def _rows_to_sample(
    scheduled: Sequence[ScheduledRows], output: TargetOutput
) -> tuple[list[tuple[ScheduledRows, int]], list[int]]:
    """The rows whose request gets tokens, each with its first row of logits; and the step's rows that need logits."""
    sampling: list[tuple[ScheduledRows, int]] = []
    logit_rows: list[int] = []
    for rows in scheduled:
        request, first = rows.request, output.row_start[rows.request]
        if not request.is_prefilling:
            sampling.append((rows, len(logit_rows)))
            logit_rows += range(first, first + rows.num_rows)
        elif rows.start + rows.num_rows == len(request.token_ids):
            sampling.append((rows, len(logit_rows)))
            logit_rows.append(first + rows.num_rows - 1)
    return sampling, logit_rows


def _choose(
    core: EngineCore, request: Request, greedy: Sequence[int], host: npt.NDArray[np.float32] | None, first: int
) -> None:
    drafts = request.draft_ids
    if request.sampler.plain_greedy:
        verified = verify_greedy(drafts, greedy, first)
    else:
        assert host is not None
        verified = request.sampler.verify(host[first : first + 1 + len(drafts)], drafts, core.rejection)
    _append(core, request, verified, host, first)


def _append(
    core: EngineCore, request: Request, verified: Verified, host: npt.NDArray[np.float32] | None, first_row: int
) -> None:
    num_drafts, request.draft_ids = len(request.draft_ids), []
    kept, reason, stop_reason = until_stop(request, verified.token_ids, core.eos_ids, core.max_model_len)
    logprobs: list[TokenLogprobs] | None = None
    if request.params.logprobs is not None:
        assert host is not None
        num_top = request.params.logprobs
        logprobs = [token_logprobs(host[first_row + i], token, num_top) for i, token in enumerate(kept)]
    position = request.num_output
    request.token_ids += kept
    request.sampler.advance(kept)
    accepted: list[int] = []
    if num_drafts:
        accepted = [min(verified.num_accepted, len(kept))]
        # Counters tell of the drafter, so they count drafts beyond the request's end too, as vLLM's do.
        core.metrics.verified(num_drafts, verified.num_accepted)
    core.metrics.num_generation_tokens += len(kept)
    if position == 0:
        core.metrics.num_cached_tokens += request.num_cached
    request.finish_reason = reason
    if request.role == "prefill":
        request.first_logprobs = logprobs[0] if logprobs else None
    chunk = TokenChunk(
        request_id=request.request_id,
        token_ids=kept,
        position=position,
        logprobs=logprobs,
        accepted=accepted,
        finish_reason=reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached,
    )
    # A prefill leg's stream stays open until its pages are free: its end is how a client that left is noticed.
    core.emit(chunk, reason is not None)


def _advance(core: EngineCore, scheduled: Sequence[ScheduledRows], output: TargetOutput) -> list[DraftRows]:
    """Note how far the target's KV goes now; returns the drafter's rows."""
    draft_rows: list[DraftRows] = []
    for rows in scheduled:
        request = rows.request
        if request.is_prefilling:
            request.num_computed = rows.start + rows.num_rows
            proposes = request.num_computed == request.prefill_len
        else:
            request.num_computed = len(request.token_ids) - 1
            proposes = True
        if core.runner.drafter is not None and request.finish_reason is None:
            num_drafts = core.num_drafts(request) if proposes else 0
            first = output.row_start[request]
            draft_rows.append(DraftRows(request, first, rows.start, request.num_computed, num_drafts))
    return draft_rows


def _propose(core: EngineCore, output: TargetOutput, draft_rows: Sequence[DraftRows]) -> dict[Request, Exception]:
    """Run the drafter. What it writes twice, when rows are run again, it writes alike."""
    try:
        core.runner.propose(output, draft_rows)
    except Exception as error:
        if len(draft_rows) == 1:
            return {draft_rows[0].request: error}
        log.warning("drafts of %d requests failed, each is run alone: %r", len(draft_rows), error)
        failed: dict[Request, Exception] = {}
        for rows in draft_rows:
            failed |= _propose(core, output, [rows])
        return failed
    return {}

"""What one step computes for its rows: target forward, sampled tokens, drafts. A request that makes it fail ends alone.

Nothing of a request changes before its tokens are chosen, so rows that fail together are simply run again, one request
at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.drafters.chain import ModuleChain
from baton.engine.plan import NOT_FINITE, DraftPlan, DraftSlots, Noise, StepPlan, StepResult, one_request
from baton.engine.planning import DraftRows, SampledRequest, choosable, draft_plan, step_plan
from baton.engine.request import Request
from baton.engine.sampler import token_logprobs
from baton.engine.scheduler import ScheduledRows
from baton.engine.stopping import until_stop
from baton.engine.verifier import Verified, verify
from baton.errors import NonFiniteLogitsError, RequestError, refusal
from baton.wire import TokenChunk, TokenLogprobs

if TYPE_CHECKING:
    from baton.engine.core import EngineCore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step computed: the drafter's rows, and the requests that could not be computed, with the cause."""

    draft_rows: list[DraftRows] = field(default_factory=list)
    failed: dict[Request, Exception] = field(default_factory=dict)


def compute(core: EngineCore, scheduled: Sequence[ScheduledRows]) -> StepOutcome:
    """Run the rows, and send the tokens they give to their clients.

    Raises what the rows of every request raise, where a harmless request of the engine's own raises too: then it is
    the engine that is broken.
    """
    _note_starts(core, scheduled)
    computed = _together(core, scheduled)
    for request, error in computed.failed.items():
        if isinstance(error, NonFiniteLogitsError):
            core.metrics.num_corrupted += 1
            # Else the same would come of every prompt that begins like this one, even where the cause has gone.
            core.cache.forget(request.kv)
    if len(computed.failed) == len(scheduled) and not _works(core):
        raise next(iter(computed.failed.values()))
    return computed


def told(request: Request, error: Exception) -> str:
    """What the client of a request that could not be computed is told. What failed here is of no interest to it, unless
    that is its own request: one that leaves no token to choose."""
    if isinstance(error, RequestError):
        log.info("%s ends: %s", request.request_id, error)
        return refusal(error)
    if isinstance(error, NonFiniteLogitsError):
        log.error("%s ends: %s", request.request_id, error)
        return f"nonfinite_logits: {error}"
    log.error("%s ends: its step failed", request.request_id, exc_info=error)
    return f"step_failed: {type(error).__name__}"


def _note_starts(core: EngineCore, scheduled: Sequence[ScheduledRows]) -> None:
    """Book how long requests waited that are computed for the first time. A decode leg waits for its KV, which handoffs
    have figures of their own for."""
    for rows in scheduled:
        request = rows.request
        if request.started_at is None and request.role != "decode":
            now = request.started_at = request.runs_since = core.clock.monotonic()
            core.metrics.queue_time.observe(now - request.queued_at)


def _together(core: EngineCore, scheduled: Sequence[ScheduledRows]) -> StepOutcome:
    layers = core.legs.layers if core.legs is not None else None
    allowed, refused = choosable(scheduled)
    if refused:
        others = [rows for rows in scheduled if rows.request not in refused]
        return _joined([StepOutcome(failed=dict(refused)), *([_together(core, others)] if others else [])])
    try:
        plan, sampled = step_plan(scheduled, allowed, core.executor.spec, core.rejection)
        result = core.executor.execute(plan, layers.begin(scheduled) if layers is not None else None)
    except Exception as error:
        if layers is not None:
            layers.withdraw()
        if len(scheduled) == 1:
            return StepOutcome(failed={scheduled[0].request: error})
        log.warning("a step of %d requests failed, each is run alone: %r", len(scheduled), error)
        return _joined([_together(core, [rows]) for rows in scheduled])
    failed: dict[Request, Exception] = _note_scores(scheduled, result.scores)
    choices = result.choices.tolist()
    for one in sampled:
        if one.request in failed:
            continue
        try:
            _choose(core, one, choices, result)
        except Exception as error:
            failed[one.request] = error
    _end_without_tokens(core, [rows for rows in scheduled if rows.request not in failed])
    draft_rows = _advance(core, scheduled, plan, failed)
    for drafted in draft_rows:
        request = drafted.request
        core.cache.plan_checkpoints(request.kv, request.token_ids, drafted.start, drafted.stop, "draft")
    failed |= _draft(core, draft_rows)
    return StepOutcome([drafted for drafted in draft_rows if drafted.request not in failed], failed)


def _joined(parts: Sequence[StepOutcome]) -> StepOutcome:
    whole = StepOutcome()
    for part in parts:
        whole.draft_rows.extend(part.draft_rows)
        whole.failed.update(part.failed)
    return whole


def _works(core: EngineCore) -> bool:
    """Whether target and drafter can compute one token, in pages of their own; yes where none is free to try it."""
    tables = core.cache.spare()
    if tables is None:
        return True
    try:
        spec, one = core.executor.spec, np.array([1])
        rows = one_request([0], tables.pages, (*spec.state_groups, *spec.draft_state_groups))
        core.executor.execute(StepPlan(rows, sample_rows=np.array([0])))
        if spec.drafts:
            noise = Noise(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64), np.zeros(1))
            contexts = (np.zeros(2, dtype=np.int64),) if spec.needs_contexts else ()
            none = np.zeros(0, dtype=np.int64)
            states = {
                name: DraftSlots(np.zeros(1, dtype=np.int64), rows.states[name].write[None], none, none, none)
                for name in spec.draft_state_groups
            }
            plan = DraftPlan(rows, np.array([0]), one, noise, contexts, chain=_one_row(core), states=states)
            core.executor.draft(plan)
    except Exception:
        return False
    finally:
        core.cache.release(tables)
    return True


def _one_row(core: EngineCore) -> ModuleChain | None:
    """The first row of a request, with which a chain's first module alone has an entry."""
    num_modules = core.executor.spec.num_modules
    if num_modules == 1:
        return None
    spans = np.zeros((1, num_modules, 2), dtype=np.int64)
    spans[0, 0, 1] = 1
    return ModuleChain(spans, [np.zeros(0, dtype=np.int64)], np.full((1, num_modules - 1), -1))


def _choose(core: EngineCore, one: SampledRequest, choices: Sequence[int], result: StepResult) -> None:
    request = one.request
    verified = verify(request.draft_ids, choices, one.first_choice)
    _append(core, request, verified, result.logits[one.first_logits :])


def _append(core: EngineCore, request: Request, verified: Verified, logits: npt.NDArray[np.float32]) -> None:
    num_drafts, request.draft_ids = len(request.draft_ids), []
    kept, reason, stop_reason = until_stop(request, verified.token_ids, core.eos_ids, core.max_model_len)
    # Rows that drafts made and the request does not reach, because they were rejected or it ends before, are no matter.
    if NOT_FINITE in kept:
        position = len(request.token_ids) + kept.index(NOT_FINITE)
        raise NonFiniteLogitsError(f"the model's logits for position {position} are not finite")
    logprobs: list[TokenLogprobs] | None = None
    if request.params.logprobs is not None:
        num_top = request.params.logprobs
        logprobs = [token_logprobs(logits[i], token, num_top) for i, token in enumerate(kept)]
    position = request.num_output
    request.token_ids += kept
    request.sampler.advance(kept)
    accepted: list[int] = []
    drafted: list[int] = []
    if num_drafts:
        accepted, drafted = [min(verified.num_accepted, len(kept))], [num_drafts]
        # Counters tell of the drafter, so they count drafts beyond the request's end too, as vLLM's do.
        core.metrics.verified(num_drafts, verified.num_accepted)
    core.metrics.num_generation_tokens += len(kept)
    if request.committed_at is not None:
        core.metrics.commit_to_first_step.observe(core.clock.monotonic() - request.committed_at)
        request.committed_at = None
    if position == 0:
        core.metrics.num_cached_tokens += request.num_cached
        core.metrics.prompt_came(request.num_prompt, request.num_cached, "local_compute")
        if request.started_at is not None:
            core.metrics.prefill_time.observe(core.clock.monotonic() - request.started_at)
    request.finish_reason = reason
    if request.role == "prefill":
        request.first_logprobs = logprobs[0] if logprobs else None
    chunk = TokenChunk(
        request_id=request.request_id,
        token_ids=kept,
        position=position,
        logprobs=logprobs,
        accepted=accepted,
        drafted=drafted,
        finish_reason=reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached,
        queued_s=request.queued_s if position == 0 else None,
        prompt_logprobs=(request.prompt_scores or None) if position == 0 else None,
    )
    # A prefill leg's stream stays open until its pages are free: its end is how a client that left is noticed.
    core.emit(chunk, reason is not None)


def _note_scores(
    scheduled: Sequence[ScheduledRows], scores: Iterable[TokenLogprobs | None]
) -> dict[Request, Exception]:
    """Book the scores of prompts; returns the requests of which one is missing. Those of a prompt that is computed
    again, after its pages were lost, are the same again."""
    left = iter(scores)
    failed: dict[Request, Exception] = {}
    for rows in scheduled:
        for position in rows.request.to_score(rows.start, rows.start + rows.num_rows):
            score = rows.request.prompt_scores[position] = next(left)
            if score is None:
                failed[rows.request] = NonFiniteLogitsError(
                    f"the model's logits for position {position} of the prompt are not finite"
                )
    return failed


def _end_without_tokens(core: EngineCore, scheduled: Sequence[ScheduledRows]) -> None:
    """End requests that wanted nothing but their prompt's scores, and have them all."""
    for rows in scheduled:
        request = rows.request
        if request.params.max_tokens == 0 and rows.start + rows.num_rows == request.prefill_len:
            request.finish_reason = "length"
            chunk = TokenChunk(
                request_id=request.request_id, finish_reason="length", prompt_logprobs=request.prompt_scores
            )
            core.emit(chunk, True)


def _advance(
    core: EngineCore, scheduled: Sequence[ScheduledRows], plan: StepPlan, failed: Container[Request]
) -> list[DraftRows]:
    """Note how far the target's KV goes now; returns the drafter's rows."""
    draft_rows: list[DraftRows] = []
    late: list[tuple[Request, int]] = []
    for rows, first in zip(scheduled, plan.rows.query_start.tolist(), strict=False):
        request = rows.request
        if request in failed:
            continue
        if request.is_prefilling:
            request.num_computed = rows.start + rows.num_rows
            drafts, num_accepted = request.num_computed == request.prefill_len, 0
        else:
            request.num_computed = len(request.token_ids) - 1
            drafts, num_accepted = True, request.num_computed - rows.start - 1
        core.cache.accept(request.kv, num_accepted, request.num_computed)
        if core.executor.spec.drafts and request.finish_reason is None:
            num_drafts = core.num_drafts(request) if drafts else 0
            drafted = DraftRows(request, first, rows.start, request.num_computed, num_drafts)
            if core.drafts_from_tokens and request.num_drafted < rows.start:
                late.append((request, num_drafts))
            else:
                draft_rows.append(drafted)
    return draft_rows + _catch_up(
        late, core.scheduler.max_num_batched_tokens - sum(r.stop - r.start for r in draft_rows)
    )


def _catch_up(late: Sequence[tuple[Request, int]], budget: int) -> list[DraftRows]:
    """Rows of a drafter that lacks entries of these requests, the first of them first, in what is left of the step's
    budget; their drafts come when it lacks none."""
    found: list[DraftRows] = []
    for request, num_drafts in late:
        start = request.num_drafted
        stop = min(request.num_computed, start + budget)
        if stop > start:
            found.append(DraftRows(request, 0, start, stop, num_drafts if stop == request.num_computed else 0))
            budget -= stop - start
    return found


def _draft(core: EngineCore, draft_rows: Sequence[DraftRows]) -> dict[Request, Exception]:
    """Run the drafter. What it writes twice, when rows are run again, it writes alike."""
    if not draft_rows:
        return {}
    try:
        result = core.executor.draft(draft_plan(draft_rows, core.executor.spec, core.rejection))
        for index, (rows, ids) in enumerate(zip(draft_rows, result.drafts, strict=True)):
            rows.request.drafted(ids)
            if len(result.carried):
                rows.request.carried = result.carried[index]
    except Exception as error:
        if len(draft_rows) == 1:
            return {draft_rows[0].request: error}
        log.warning("drafts of %d requests failed, each is run alone: %r", len(draft_rows), error)
        failed: dict[Request, Exception] = {}
        for rows in draft_rows:
            failed |= _draft(core, [rows])
        return failed
    return {}

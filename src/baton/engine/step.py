"""Computes one step. If a request makes it fail, only it ends: no request changes before its tokens are chosen, so rows
that fail together run again, one request at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.clock import Clock
from baton.engine.chunks import step_chunk
from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.metrics import EngineMetrics
from baton.engine.planning import DraftRows, FeatureRows, SampledRequest, allowed_tokens, draft_plan, step_plan
from baton.engine.request import Request
from baton.engine.sampling.logprobs import token_logprobs
from baton.engine.sampling.stopping import until_stop
from baton.engine.sampling.verifier import Verified, verify
from baton.engine.scheduler import ScheduledRows, Scheduler
from baton.engine.speculation.adaptive import AdaptiveDrafts, kept_drafts, limit_drafts
from baton.engine.speculation.deferred import DeferredRows, catch_up
from baton.engine.speculation.probe import draft_probe, target_probe
from baton.engine.step_plans import NOT_FINITE, StepPlan, StepResult
from baton.errors import NonFiniteLogitsError, RequestError, refusal_text
from baton.wire import TokenChunk, TokenLogprobs

if TYPE_CHECKING:
    from baton.engine.executor import Executor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodingLimits:
    """`rejection`: how drafts are verified, else coupled."""

    eos_ids: frozenset[int]
    max_model_len: int
    num_speculative_tokens: int = 0
    rejection: bool = False

    def num_drafts(self, request: Request) -> int:
        """Drafts and the token after them must fit into the context."""
        return min(self.num_speculative_tokens, self.max_model_len - len(request.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The rows that the drafter ran, and failed requests with their cause."""

    draft_rows: list[DraftRows] = field(default_factory=list)
    failed: dict[Request, Exception] = field(default_factory=dict)


class StepRunner:
    """`emit` gets each chunk, and whether it is the request's last."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        legs: HandoffLegs | None,
        limits: DecodingLimits,
        emit: Callable[[TokenChunk, bool], None],
        metrics: EngineMetrics,
        clock: Clock,
    ) -> None:
        self.executor, self.scheduler, self.cache, self.legs = executor, scheduler, scheduler.cache, legs
        self.limits, self.emit, self.metrics, self.clock = limits, emit, metrics, clock
        self.adaptive: AdaptiveDrafts | None = None  # None: all get the most drafts
        self.deferred: DeferredRows | None = None  # None: the drafter computes every row at once
        # Called if `emit` got the first token of a request that is drafted for, or of a leg.
        self.after_first: Callable[[], None] = lambda: None
        # A drafter that reads only tokens computes a prompt's missing entries later, in separate rows.
        self.drafts_from_tokens = {rules.module for rules in self.cache.rules.values()} - {0} == {None}

    def compute(self, scheduled: Sequence[ScheduledRows]) -> StepOutcome:
        """Raises a request's error if all fail and a trivial one fails too: the engine is broken."""
        self._note_starts(scheduled)
        computed = self._run_batch(scheduled)
        for request, error in computed.failed.items():
            if isinstance(error, NonFiniteLogitsError):
                self.metrics.num_corrupted += 1
                # Otherwise prompts with the same prefix would fail even after the cause is gone.
                self.cache.forget(request.kv)
        if len(computed.failed) == len(scheduled) and not self.can_compute():
            raise next(iter(computed.failed.values()))
        return computed

    def _note_starts(self, scheduled: Sequence[ScheduledRows]) -> None:
        """Queue times; handoff metrics cover decode legs."""
        for rows in scheduled:
            request = rows.request
            if request.times.started_at is None and request.role != "decode":
                now = request.times.started_at = request.times.runs_since = self.clock.monotonic()
                self.metrics.queue_time.observe(now - request.times.queued_at)
            if request.times.wanted and request.is_prefilling:
                request.times.mark_chunk(rows.num_rows, self.clock.monotonic())

    def _run_batch(self, scheduled: Sequence[ScheduledRows]) -> StepOutcome:
        """Requests that fail together run again alone."""
        allowed, refused = allowed_tokens(scheduled)
        if refused:
            others = [rows for rows in scheduled if rows.request not in refused]
            return _joined([StepOutcome(failed=dict(refused)), *([self._run_batch(others)] if others else [])])
        began = self.adaptive.timer() if self.adaptive is not None else 0.0
        layers = self.legs.layers if self.legs is not None else None
        try:
            plan, sampled = step_plan(scheduled, allowed, self.executor.spec, self.limits.rejection)
            if self.deferred is not None:
                number, oldest = self.deferred.begin(len(plan.rows.token_ids))
                plan = replace(plan, number=number, oldest=oldest)
            result = self.executor.execute(plan, layers.begin(scheduled) if layers is not None else None)
        except Exception as error:
            if layers is not None:
                layers.withdraw()
            if len(scheduled) == 1:
                return StepOutcome(failed={scheduled[0].request: error})
            log.warning("a step of %d requests failed, each is run alone: %r", len(scheduled), error)
            return _joined([self._run_batch([rows]) for rows in scheduled])
        failed = self._emit_tokens(scheduled, sampled, result, began)
        waits = not failed and len(plan.rows.token_ids) == len(scheduled) and self._all_wait(scheduled)
        draft_rows = self._advance(scheduled, plan, failed, waits)
        if waits:
            return StepOutcome()
        if self.adaptive is not None:
            draft_rows = limit_drafts(self.adaptive, draft_rows)
        if self.deferred is not None:
            draft_rows = self.deferred.due(draft_rows)
        for drafted in draft_rows:
            request = drafted.request
            self.cache.plan_checkpoints(request.kv, request.token_ids, drafted.start, drafted.stop, "draft")
        failed |= self._draft(draft_rows)
        return StepOutcome([drafted for drafted in draft_rows if drafted.request not in failed], failed)

    def _emit_tokens(
        self, scheduled: Sequence[ScheduledRows], sampled: Sequence[SampledRequest], result: StepResult, began: float
    ) -> dict[Request, Exception]:
        """Returns the requests that fail. `began`: the forward's start, by the timer of `adaptive`."""
        failed: dict[Request, Exception] = _note_scores(scheduled, result.scores)
        choices = result.choices.tolist()
        any_first = any(one.request.is_first_step(self.executor.spec.drafts) for one in sampled)
        for one in sampled:
            if one.request in failed:
                continue
            try:
                verified = verify(one.request.draft_ids, choices, one.first_choice)
                self._append(one.request, verified, result.logits[one.first_logits :])
            except Exception as error:
                failed[one.request] = error
        if self.adaptive is not None:
            self.adaptive.computed(scheduled, self.adaptive.timer() - began)
        if any_first:
            self.after_first()
        self._end_without_tokens([rows for rows in scheduled if rows.request not in failed])
        return failed

    def can_compute(self) -> bool:
        """Whether target and drafter can compute one token in spare pages; True if there are none."""
        tables = self.cache.spare()
        if tables is None:
            return True
        try:
            spec = self.executor.spec
            self.executor.execute(target_probe(spec, tables.tables, 1, 1))
            if spec.drafts:
                self.executor.draft(draft_probe(spec, tables.tables, 1, 1))
        except Exception:
            return False
        finally:
            self.cache.release(tables)
        return True

    def _append(self, request: Request, verified: Verified, logits: npt.NDArray[np.float32]) -> None:
        num_drafts, request.draft_ids = len(request.draft_ids), []
        kept, reason, stop_reason = until_stop(
            request, verified.token_ids, self.limits.eos_ids, self.limits.max_model_len
        )
        # Rows after a rejected draft or after the end do not matter.
        if NOT_FINITE in kept:
            position = len(request.token_ids) + kept.index(NOT_FINITE)
            raise NonFiniteLogitsError(f"the model's logits for position {position} are not finite")
        logprobs: list[TokenLogprobs] | None = None
        if request.params.logprobs is not None:
            logprobs = token_logprobs(logits[: len(kept)], kept, [request.params.logprobs] * len(kept))
        position = request.num_output
        request.token_ids += kept
        request.sampler.advance(kept)
        request.finish_reason = reason
        if request.role == "prefill":
            request.first_logprobs = logprobs[0] if logprobs else None
        self._measure_tokens(request, num_drafts, verified.num_accepted, len(kept))
        if position == 0:
            self._measure_prompt(request)
        drafts = (num_drafts, verified.num_accepted) if num_drafts else ()
        chunk = step_chunk(request, kept, logprobs, drafts, stop_reason, self.clock)
        # A prefill leg's stream stays open until its pages are free, to show that the client left.
        self.emit(chunk, reason is not None)

    def _measure_tokens(self, request: Request, num_drafts: int, num_accepted: int, num_kept: int) -> None:
        """As in vLLM, counters include drafts after the request's end."""
        if num_drafts:
            self.metrics.verified(num_drafts, num_accepted)
            if self.adaptive is not None:
                self.adaptive.verified(request, num_drafts, num_accepted)
        self.metrics.num_generation_tokens += num_kept
        if request.times.committed_at is not None:
            self.metrics.commit_to_first_step.observe(self.clock.monotonic() - request.times.committed_at)
            request.times.committed_at = None

    def _measure_prompt(self, request: Request) -> None:
        self.metrics.num_cached_tokens += request.num_cached
        self.metrics.prompt_came(request.num_prompt, request.num_cached, "local_compute")
        if request.times.started_at is not None:
            self.metrics.prefill_time.observe(self.clock.monotonic() - request.times.started_at)

    def _end_without_tokens(self, scheduled: Sequence[ScheduledRows]) -> None:
        """Requests that want only prompt logprobs (`max_tokens` 0) end with their prompt."""
        for rows in scheduled:
            request = rows.request
            if request.params.max_tokens == 0 and rows.start + rows.num_rows == request.prefill_len:
                request.finish_reason = "length"
                chunk = TokenChunk(
                    request_id=request.request_id, finish_reason="length", prompt_logprobs=request.prompt_logprobs
                )
                self.emit(chunk, True)

    def _all_wait(self, scheduled: Sequence[ScheduledRows]) -> bool:
        """Whether the drafter's rows of a step with a row of each request wait."""
        if self.adaptive is None or self.deferred is None:
            return False
        requests = [rows.request for rows in scheduled]
        ends = any(request.finish_reason is not None or request.is_prefilling for request in requests)
        return not ends and self.adaptive.holds_none(requests) and self.deferred.wait(requests)

    def draft_late(self, late: Sequence[DraftRows]) -> None:
        """Outside of a step."""
        self.executor.draft(draft_plan(late, self.executor.spec, self.limits.rejection, is_late=True))

    def _advance(
        self, scheduled: Sequence[ScheduledRows], plan: StepPlan, failed: Container[Request], waits: bool
    ) -> list[DraftRows]:
        """Returns the drafter's rows, none if all wait."""
        drafts = self.executor.spec.drafts and not waits
        draft_rows: list[DraftRows] = []
        late: list[tuple[Request, int]] = []
        for rows, first in zip(scheduled, plan.rows.query_start.tolist(), strict=False):
            request = rows.request
            if request in failed:
                continue
            if request.is_prefilling:
                request.num_computed = rows.start + rows.num_rows
                decodes, num_accepted = request.num_computed == request.prefill_len, 0
            else:
                request.num_computed = len(request.token_ids) - 1
                decodes, num_accepted = True, request.num_computed - rows.start - 1
            self.cache.accept(request.kv, num_accepted, request.num_computed)
            if drafts and request.finish_reason is None:
                num_drafts = self.limits.num_drafts(request) if decodes else 0
                features = (FeatureRows(plan.number, first, request.num_computed - rows.start),)
                drafted = DraftRows(request, features, rows.start, request.num_computed, num_drafts)
                if self.drafts_from_tokens and request.num_drafted < rows.start:
                    late.append((request, num_drafts))
                else:
                    draft_rows.append(drafted)
        return draft_rows + catch_up(
            late, self.scheduler.max_num_batched_tokens - sum(r.stop - r.start for r in draft_rows)
        )

    def _draft(self, draft_rows: Sequence[DraftRows]) -> dict[Request, Exception]:
        """Rows that run again after a failure write the same KV."""
        if not draft_rows:
            return {}
        began = self.adaptive.timer() if self.adaptive is not None else 0.0
        try:
            margins = self.adaptive is not None
            result = self.executor.draft(draft_plan(draft_rows, self.executor.spec, self.limits.rejection, margins))
            kept = kept_drafts(self.adaptive, draft_rows, result)
            for index, (rows, ids) in enumerate(zip(draft_rows, kept, strict=True)):
                rows.request.drafted(ids)
                if len(result.mtp_hidden):
                    rows.request.mtp_hidden = result.mtp_hidden[index]
        except Exception as error:
            if len(draft_rows) == 1:
                return {draft_rows[0].request: error}
            log.warning("drafts of %d requests failed, each is run alone: %r", len(draft_rows), error)
            failed: dict[Request, Exception] = {}
            for rows in draft_rows:
                failed |= self._draft([rows])
            return failed
        if self.adaptive is not None:
            self.adaptive.drafted(draft_rows, self.adaptive.timer() - began)
        return {}

    def num_drafts_of(self, request: Request) -> int:
        """How many drafts of a handoff to verify, given the running requests."""
        most = self.limits.num_drafts(request)
        if self.adaptive is None or most <= 0:
            return most
        batch = [one for one in self.scheduler.running if not one.is_prefilling] + [request]
        return int(self.adaptive.choose(batch, [self.limits.num_drafts(one) for one in batch])[-1])


def client_error(request: Request, error: Exception) -> str:
    """Error text for the client of a failed request. Internal errors show only their type; the log has the rest."""
    if isinstance(error, RequestError):
        log.info("%s ends: %s", request.request_id, error)
        return refusal_text(error)
    if isinstance(error, NonFiniteLogitsError):
        log.error("%s ends: %s", request.request_id, error)
        return f"nonfinite_logits: {error}"
    log.error("%s ends: its step failed", request.request_id, exc_info=error)
    return f"step_failed: {type(error).__name__}"


def _joined(parts: Sequence[StepOutcome]) -> StepOutcome:
    whole = StepOutcome()
    for part in parts:
        whole.draft_rows.extend(part.draft_rows)
        whole.failed.update(part.failed)
    return whole


def _note_scores(
    scheduled: Sequence[ScheduledRows], scores: Sequence[TokenLogprobs | None]
) -> dict[Request, Exception]:
    """Returns the requests with non-finite logits. A recomputed prompt gets the same logprobs again."""
    if not scores:
        return {}
    left = iter(scores)
    failed: dict[Request, Exception] = {}
    for rows in scheduled:
        for position in rows.request.logprob_positions(rows.start, rows.start + rows.num_rows):
            score = rows.request.prompt_logprobs[position] = next(left)
            if score is None:
                failed[rows.request] = NonFiniteLogitsError(
                    f"the model's logits for position {position} of the prompt are not finite"
                )
    return failed

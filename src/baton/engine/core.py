"""The engine loop: schedule, target forward, sample, draft, finalise; and the effects of handoff events on requests.

Nothing is declared final before the drafter has run (docs/lifecycle.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.engine.chunks import seed_chunk
from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.legs.leg import Effect, PagesReleased, PrefixArrived, RequestFailed, SeedsArrived
from baton.engine.mailbox import Mailbox
from baton.engine.metrics import EngineMetrics
from baton.engine.planning import DraftRows
from baton.engine.ranks.lockstep import Peers, SingleRank
from baton.engine.request import Request, RequestStatus
from baton.engine.sampling.stopping import until_stop
from baton.engine.scheduler import ScheduledRows, Scheduler
from baton.engine.step import DecodingLimits, StepRunner, client_error
from baton.errors import BatonError
from baton.handoff.protocol.events import HandoffEvent
from baton.handoff.protocol.messages import Seeds
from baton.wire import EngineLoad, FinishReason, TokenChunk

if TYPE_CHECKING:
    # The core itself does not import torch.
    from baton.engine.executor import Executor
    from baton.engine.speculation.late_rows import LateRows
    from baton.kvstore.prefix_store import PrefixStore

EmitChunk = Callable[[TokenChunk, bool], None]


class EngineCore:
    """Calls `emit(chunk, last)` on the engine thread; other threads `post`."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        legs: HandoffLegs | None,
        limits: DecodingLimits,
        emit: EmitChunk,
        prefix_store: PrefixStore | None = None,
        queue_timeout_s: float = 0.0,
        mailbox: Mailbox | None = None,
    ) -> None:
        self.scheduler, self.legs, self.limits, self.emit = scheduler, legs, limits, emit
        self.cache = scheduler.cache
        self._reach = max(pool.reach for pool in self.cache.pools.values())
        self.prefix_store = prefix_store
        self.queue_timeout_s, self.mailbox = queue_timeout_s, mailbox or Mailbox()
        self.clock = self.mailbox.clock
        self._arrivals = itertools.count(1)
        self.metrics = EngineMetrics() if legs is None else legs.metrics
        self.steps = StepRunner(executor, scheduler, legs, limits, emit, self.metrics, self.clock)
        self.requests: dict[str, Request] = {}
        self._step_s = 0.0  # in steps, since the start
        self.late: LateRows | None = None
        self.peers: Peers = SingleRank()
        if prefix_store is not None:
            prefix_store.bind(self.post, lambda operation: self.metrics.prefix_store_failures.update((operation,)))

    @property
    def executor(self) -> Executor:
        return self.steps.executor

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` before the next step. Thread-safe."""
        self.mailbox.post(call)

    def stop(self) -> None:
        """Thread-safe."""
        self.mailbox.stop()

    def run(self) -> None:
        """Run turns until `stop`. Raises a posted error, after which the ranks' memory may hold anything."""
        while not (self.mailbox.stopping and self.peers.ended):
            self.turn()

    def turn(self) -> None:
        """Run one step; without work, sleep until something is posted."""
        mailbox = self.mailbox
        mailbox.begin_turn()
        self.drain()
        again = self.peers.turn(self.step, mailbox.stopping)
        mailbox.end_turn()
        if not again:
            # Requests that wait for pages may time out.
            mailbox.sleep(self.peers.may_sleep, 0.5 if self.scheduler.has_work else None)

    def drain(self) -> None:
        for item in self.mailbox.take():
            if isinstance(item, BatonError):
                raise item
            if callable(item):
                item()
            else:
                self.on_handoff(item)

    def load(self) -> EngineLoad:
        """Thread-safe."""
        return self.metrics.load_of(self.scheduler, len(self.legs.open) if self.legs else 0)

    def forget_metrics(self) -> None:
        self.metrics = self.steps.metrics = EngineMetrics()
        if self.legs is not None:
            self.legs.metrics = self.metrics

    def add(self, request: Request) -> None:
        """The request's id is not in use."""
        if self.late is not None:
            self.late.find(request)
        if request.prefix_len is not None:
            return self._move_prefix(request)
        if request.max_prefill_tokens is not None and self.scheduler.num_missing(request) > request.max_prefill_tokens:
            return self._decline(request, "prefix_missing: too much of the prompt is not here")
        self._note_arrival(request)
        self.metrics.num_prompt_tokens += request.num_prompt
        if self.legs is not None and request.role is not None:
            self.legs.open_leg(request)
        if self.prefix_store is None or not self.prefix_store.load(request, lambda num: self._loaded(request, num)):
            self._queue(request)

    def _decline(self, request: Request, error: str) -> None:
        self._emit_chunk(request, True, finish_reason="error", error=error, recoverable=True)

    def _emit_chunk(self, request: Request, last: bool, **fields: Any) -> None:
        self.emit(TokenChunk(request_id=request.request_id, **fields), last)

    def _note_arrival(self, request: Request) -> None:
        self.requests[request.request_id] = request
        request.arrival, request.times.queued_at = next(self._arrivals), self.clock.monotonic()

    def _move_prefix(self, request: Request) -> None:
        """Send or receive cached KV. Needs no free pages on either side."""
        assert self.legs is not None
        if request.role == "prefill" and not self.legs.prefixes.hold(request):
            return self._decline(request, "prefix_missing: too little of the prompt is here")
        self._note_arrival(request)
        request.times.step_s_before = self._step_s - self.mailbox.delay_s
        self.legs.open_leg(request)
        if request.role == "prefill":
            self._emit_chunk(request, False, num_cached_tokens=request.prefix_len, window_start=request.window_start)

    def _loaded(self, request: Request, num_tokens: int) -> None:
        self.metrics.num_loaded_tokens += num_tokens
        if request.status is RequestStatus.WAITING:  # else it was aborted
            self._queue(request)

    def _queue(self, request: Request) -> None:
        if request.role == "decode" and self.legs is not None:
            self.legs.set_ready(request)
        else:
            self.scheduler.enqueue(request)

    def abort(self, request_id: str) -> None:
        """End a request whose client is gone. Pages that a transport may touch are kept."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.status is not RequestStatus.AWAITING_RELEASE:
            self.finish(request, "abort")
        elif request.finish_reason is None:
            # It ends when its pages are released.
            assert self.legs is not None
            request.finish_reason = "abort"
            self.legs.abandon(request)

    def finish(
        self, request: Request, reason: FinishReason, error: str | None = None, recoverable: bool = False
    ) -> None:
        """End a request for another reason than its tokens."""
        self._end(request, reason, error)
        self._emit_chunk(request, True, finish_reason=reason, error=error, recoverable=recoverable)

    def _end(
        self, request: Request, reason: FinishReason | None, error: str | None = None, by_tokens: bool = False
    ) -> None:
        """`reason`: None for a prefill leg whose request continues on D. `by_tokens`: of a step."""
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
        if request.status is not RequestStatus.AWAITING_RELEASE:  # else `_await_release` has counted it
            self._count(request, reason)
        request.finish_reason = reason
        self.scheduler.remove(request)
        request.transition(RequestStatus.FINISHED)
        if self.legs is not None and self.legs.abort_leg(request, error):
            return
        if self.late is None or not by_tokens or not self.late.keep(request):
            self.scheduler.release(request)

    def _await_release(self, request: Request) -> None:
        self.scheduler.remove(request)
        request.transition(RequestStatus.AWAITING_RELEASE)
        self._count(request, request.finish_reason)

    def _count(self, request: Request, reason: FinishReason | None) -> None:
        if request.prefix_len is not None:
            return
        self.metrics.num_requests[reason or "handoff"] += 1
        if request.times.runs_since is not None:
            self.metrics.inference_time.observe(self.clock.monotonic() - request.times.runs_since)

    def on_handoff(self, event: HandoffEvent) -> None:
        if self.legs is not None:
            self._carry_out(self.legs.handle(event))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            request = effect.request
            match effect:
                case RequestFailed():
                    self.finish(request, "error", effect.error, effect.recoverable)
                case PrefixArrived():
                    self._end(request, "length")
                    queued_s = self._step_s - request.times.step_s_before
                    fields = {"num_cached_tokens": effect.num_tokens, "queued_s": queued_s}
                    self._emit_chunk(request, True, finish_reason="length", **fields)
                case SeedsArrived():
                    (self._finished_elsewhere if effect.finished else self._committed)(request, effect.seeds)
                case PagesReleased() if request.status is RequestStatus.AWAITING_RELEASE:
                    has_ended = request.finish_reason is not None
                    self._end(request, request.finish_reason)
                    if not has_ended:
                        self._emit_chunk(request, True)
                case PagesReleased():
                    self.scheduler.release(request)

    def step(self) -> bool:
        """Returns False if there was nothing to compute."""
        now = self.clock.monotonic()
        self._expire_queues(now)
        if self.legs is not None:
            # Requests that wait for pages to recompute block the queue.
            self._carry_out(self.legs.expire_recomputing(now))
            self.legs.start_receives()
        scheduled = self.scheduler.schedule()
        if self.legs is not None:
            self.legs.admit(rows.request for rows in scheduled)
        if not scheduled:
            return self.late is not None and self.late.compute()
        if self.late is not None:
            self.late.relieve()
        prompts = [rows.num_rows for rows in scheduled if rows.request.is_prefilling]
        done = self.steps.compute(scheduled)
        for request, error in done.failed.items():
            self.finish(request, "error", client_error(request, error))
        self._finalise([rows for rows in scheduled if rows.request not in done.failed], done.draft_rows)
        seconds = self.clock.monotonic() - now
        if (budget := self.scheduler.prompt_budget) is not None:
            budget.computed(sum(prompts), len(prompts) < len(scheduled), seconds)
        self._step_s += seconds
        self.metrics.num_steps += 1
        self.metrics.step_tokens.observe(sum(rows.num_rows for rows in scheduled))
        return True

    def _expire_queues(self, now: float) -> None:
        if self.queue_timeout_s <= 0:
            return
        for request in self.scheduler.queued():
            if not request.started and now >= request.times.queued_at + self.queue_timeout_s:
                self.finish(request, "error", f"queue_timeout: no room within {self.queue_timeout_s:g} s")

    def _finalise(self, scheduled: Sequence[ScheduledRows], draft_rows: Sequence[DraftRows]) -> None:
        for drafted in draft_rows:
            drafted.request.num_drafted = drafted.stop
            self.cache.accept(drafted.request.kv, 0, drafted.stop, "draft")
            drafted.request.num_known_drafted = len(drafted.request.token_ids)
        for rows in scheduled:
            self._finalise_request(rows.request, rows.start)

    def _finalise_request(self, request: Request, start: int) -> None:
        """`start`: the first of its rows in this step."""
        if request.finish_reason is not None:
            # Entries that depend on this step's tokens came from drafts.
            known = max(start + 1, request.prefill_len)
            request.num_drafted = max(0, min(request.num_drafted, known - self._reach))
        self._enter(request)
        if self.prefix_store is not None and start < request.prefill_len <= request.num_computed:
            self.prefix_store.save(request, self._num_final(request))
        if request.role == "prefill" and self.legs is not None:
            self.legs.declare(request)
            if not request.is_prefilling:
                self._await_release(request)
        elif request.finish_reason is not None:
            self._end(request, request.finish_reason, by_tokens=True)
        # A prefix store reads them once all are computed.
        if request.status is RequestStatus.RUNNING and not (request.is_prefilling and self.prefix_store is not None):
            known, first = len(request.token_ids), request.first_drafted
            self.cache.slide(request.kv, known, request.num_computed, request.num_drafted, first)

    def _enter(self, request: Request) -> None:
        self.cache.advance(request.kv, request.token_ids, request.num_computed, request.num_drafted)

    def _num_final(self, request: Request) -> int:
        known, computed, drafted = len(request.token_ids), request.num_computed, request.num_drafted
        paged = (name for name, rules in self.cache.rules.items() if rules.kind != "state")
        return min((self.cache.num_final(name, known, computed, drafted) for name in paged), default=computed)

    def _committed(self, request: Request, seeds: Seeds) -> None:
        """The first step verifies the received drafts."""
        request.num_computed = request.prefill_len
        if request.num_output == 0:
            request.seed = seed_chunk(request, seeds, None, None, self.clock)
            request.token_ids.append(seeds.first_token)
            request.sampler.advance([seeds.first_token])
        self._seed_drafter(request, seeds)
        request.times.committed_at = request.times.runs_since = self.clock.monotonic()
        num_cached = min(request.num_cached, request.num_prompt)
        self.metrics.prompt_came(request.num_prompt, num_cached, "external_kv_transfer")
        self.scheduler.commit_receive(request)
        self._enter(request)

    def _seed_drafter(self, request: Request, seeds: Seeds) -> None:
        """The drafter continues where P's ended, or cold without its KV."""
        request.num_drafted = request.prefill_len
        if request.draft_prefix_len is not None:
            if self.steps.drafts_from_tokens:
                request.num_drafted = request.draft_prefix_len
            else:
                request.first_drafted = request.prefill_len
        request.num_known_drafted = len(request.token_ids)
        num_modules = self.executor.spec.num_modules
        if num_modules > 1 and request.draft_prefix_len is None:
            mtp_hidden = np.frombuffer(seeds.drafter_states, dtype="<f4").astype(np.float32)
            request.mtp_hidden = mtp_hidden.reshape(num_modules - 1, -1)
        # P's context may be longer, and its drafter may draft more.
        request.draft_ids = list(seeds.draft_token_ids[: self.steps.num_drafts_of(request)])

    def _finished_elsewhere(self, request: Request, seeds: Seeds) -> None:
        _, reason, stop_reason = until_stop(
            request, [seeds.first_token], self.limits.eos_ids, self.limits.max_model_len
        )
        assert reason is not None
        self._end(request, reason)
        self.emit(seed_chunk(request, seeds, reason, stop_reason, self.clock), True)

"""Where an engine's requests meet the handoff agent: legs, destination pages, and who may free what.

Runs on the engine thread; the agent's events are posted to it. A leg's pages are released exactly once: P's on
`PrefillReleased`, D's with its request after commit, or on `DecodeReleased` after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from baton.engine.request import Request, RequestStatus
from baton.handoff.events import (
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeReleased,
    HandoffEvent,
    PrefillReleased,
)
from baton.handoff.interval import wanted
from baton.handoff.messages import AttemptKey, Seeds
from baton.handoff.ticket import Ticket
from baton.kv.geometry import GroupSpec
from baton.wire import TokenChunk

if TYPE_CHECKING:
    from baton.engine.core import EngineCore


class Agent(Protocol):
    """The part of `baton.handoff.agent.HandoffAgent` that an engine uses. Thread-safe calls, none blocks."""

    def open_prefill(self, ticket: Ticket) -> None: ...
    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None: ...
    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool) -> None: ...
    def open_decode(
        self,
        ticket: Ticket,
        prompt_len: int,
        wanted: dict[str, tuple[int, int]],
        pages: dict[str, list[int]],
    ) -> None: ...
    def abort(self, key: AttemptKey, reason: str) -> None: ...


class HandoffLegs:
    """Open legs of one engine by attempt."""

    def __init__(
        self,
        agent: Agent,
        groups: Sequence[GroupSpec],
        vocab_size: int,
        num_drafts: int,
        alter_seeds: Callable[[Seeds], Seeds] | None = None,
    ) -> None:
        """`alter_seeds` is the seam at which the `faulty` transport breaks seeds on purpose."""
        self.agent = agent
        self.alter_seeds = alter_seeds
        self.groups = groups
        self.vocab_size = vocab_size
        self.num_drafts = num_drafts
        self.open: dict[AttemptKey, Request] = {}
        self._core: EngineCore | None = None

    def bind(self, core: EngineCore) -> None:
        """The core whose requests these legs belong to."""
        self._core = core

    @property
    def core(self) -> EngineCore:
        assert self._core is not None
        return self._core

    def opened(self, request: Request) -> None:
        """A leg arrived. A prefill leg is announced at once, so that an early REGISTER finds it."""
        assert request.ticket is not None
        self.open[request.ticket.key] = request
        if request.role == "prefill":
            self.agent.open_prefill(request.ticket)

    def start_receives(self, now: float) -> None:
        """Register decode legs for which there is room, in order of arrival. `now`: unix seconds, as expiries."""
        scheduler = self.core.scheduler
        while scheduler.receive_queue:
            request = scheduler.receive_queue[0]
            ticket = request.ticket
            assert ticket is not None
            if now >= ticket.expiry:
                self.core.finish(request, "error", "handoff_timeout: no pages came free in time")
                continue
            hits = scheduler.start_receive(request)
            if hits is None:
                return
            scheduler.receive_queue.popleft()
            intervals: dict[str, tuple[int, int]] = {}
            for group in self.groups:
                interval = wanted(group.kind, group.window, request.num_prompt, hits[group.name], owner=group.owner)
                intervals[group.name] = (interval.start, interval.stop)
                if group.kind == "sliding_window" and interval.start > hits[group.name]:
                    scheduler.drop_outside_window(request, group.name, interval.start)
            request.num_cached = min(hits.values())
            self.agent.open_decode(ticket, request.num_prompt, intervals, dict(request.pages))

    def prefilled(self, request: Request) -> None:
        """After the drafter ran: declare what became final; with the last chunk, hand over the seeds."""
        assert request.ticket is not None
        key, n = request.ticket.key, request.num_prompt
        final = {
            group.name: min(request.num_drafted, n - 1) if group.owner == "draft" else min(request.num_computed, n)
            for group in self.groups
        }
        self.agent.declare_final(key, n, dict(request.pages), final)
        if request.num_output == 0:
            return
        seeds = Seeds(
            first_token=request.token_ids[n],
            first_logprobs=request.first_logprobs,
            draft_token_ids=list(request.draft_ids),
        )
        if self.alter_seeds is not None:
            seeds = self.alter_seeds(seeds)
        if request.finish_reason is not None:
            self.core.requests.pop(request.request_id, None)
        self.core.scheduler.remove(request)
        request.status = RequestStatus.HELD
        self.core.metrics.num_requests[request.finish_reason or "handoff"] += 1
        self.agent.finish_prefill(key, seeds, request.finish_reason is not None)

    def keeps_pages(self, request: Request, was: RequestStatus) -> bool:
        """A request ended early: whether the agent must first prove its pages quiet (it is told to give up)."""
        if request.ticket is None or request.ticket.key not in self.open:
            return False
        key = request.ticket.key
        if request.role == "decode":
            if was is RequestStatus.RUNNING:
                return False
            if was is RequestStatus.WAITING:
                # P may already hold pages for it; without a word from here it would until the ticket expires.
                self.agent.open_decode(request.ticket, request.num_prompt, {}, {})
        self.agent.abort(key, "aborted" if request.finish_reason == "abort" else "failed")
        if request.role == "decode":
            self._quarantine(request)
        return True

    def abandon(self, request: Request) -> None:
        """The client of a computed prefill leg is gone. D may never have heard of the attempt, and then only this
        ends it before its ticket does."""
        assert request.ticket is not None
        self.core.requests.pop(request.request_id, None)
        request.finish_reason = "abort"
        self.agent.abort(request.ticket.key, "aborted")

    def _quarantine(self, request: Request) -> None:
        request.quarantined = self.core.scheduler.release(request, quarantine=True)

    def handle(self, event: HandoffEvent) -> None:
        """An event of the agent, on the engine thread."""
        request = self.open.get(event.key)
        if request is None:
            return
        metrics = self.core.metrics
        if isinstance(event, DecodeFailed):
            metrics.handoff_failures[event.reason] += 1
            if request.status is RequestStatus.RECEIVING:
                self.core.finish(request, "error", f"{event.reason}: {event.message}")
            return
        del self.open[event.key]
        if isinstance(event, PrefillReleased):
            metrics.num_handoffs[event.outcome] += 1
            if request.status in (RequestStatus.WAITING, RequestStatus.RUNNING):
                self.core.finish(request, "error", f"handoff_failed: {event.outcome}")
            else:
                self.core.scheduler.release(request)
                if request.status is RequestStatus.HELD and request.finish_reason is None:
                    self.core.requests.pop(request.request_id, None)
                    self.core.emit(TokenChunk(request_id=request.request_id), True)
        elif isinstance(event, DecodeCommitted):
            metrics.num_handoffs["committed"] += 1
            metrics.handoff_bytes += event.num_bytes
            metrics.handoff_runs += event.num_runs
            self._commit(request, event.seeds)
        elif isinstance(event, DecodeFinished):
            metrics.num_handoffs["finished"] += 1
            if request.status is RequestStatus.RECEIVING:
                self.core.finish(request, "stop")
            self._leave_quarantine(request)
        elif isinstance(event, DecodeReleased):
            metrics.num_handoffs["released"] += 1
            self._leave_quarantine(request)

    def _commit(self, request: Request, seeds: Seeds) -> None:
        if request.status is not RequestStatus.RECEIVING:
            # Aborted here while the commit was on its way: everything is in place, so the pages are quiet.
            self._leave_quarantine(request)
            return
        ids = [seeds.first_token, *seeds.draft_token_ids]
        if not all(0 <= i < self.vocab_size for i in ids) or len(seeds.draft_token_ids) > self.num_drafts:
            self.core.finish(request, "error", "bad_seeds: token ids out of range or too many drafts")
            return
        self.core.committed(request, seeds.first_token, seeds.draft_token_ids)

    def _leave_quarantine(self, request: Request) -> None:
        for name, pages in request.quarantined.items():
            self.core.scheduler.pools[name].leave_quarantine(pages)
        request.quarantined = {}

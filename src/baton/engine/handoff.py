"""Where an engine's requests meet the handoff agent: legs, destination pages, and who may free what.

Runs on the engine thread; the agent's events are posted to it. A leg's pages are released exactly once: P's on
`PrefillReleased`, D's with its request after commit, or on `DecodeReleased` after a failure. A request of D whose
handoff failed need not wait for that: it goes on with other pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from baton.engine.request import Request, RequestStatus
from baton.engine.stopping import until_stop
from baton.errors import reason_label
from baton.handoff.protocol.events import (
    DecodeAdmitted,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeProgress,
    DecodeReleased,
    HandoffEvent,
    PrefillReleased,
)
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.handoff.protocol.ticket import Ticket
from baton.kv.cache import BlockTables
from baton.kv.interval import Interval
from baton.wire import Recovery, TokenChunk, recovers

if TYPE_CHECKING:
    from baton.engine.core import EngineCore


class Agent(Protocol):
    """The part of `baton.handoff.node.agent.HandoffAgent` that an engine uses. Thread-safe calls, none blocks."""

    def open_prefill(self, ticket: Ticket) -> None: ...
    def admit_prefill(self, key: AttemptKey) -> None: ...
    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None: ...
    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool, final: dict[str, int]) -> None: ...
    def announce_decode(self, ticket: Ticket) -> None: ...
    def open_decode(
        self,
        ticket: Ticket,
        prompt_len: int,
        wanted: dict[str, Interval],
        pages: dict[str, list[int]],
    ) -> None: ...
    def abort(self, key: AttemptKey, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class Leg:
    """One open attempt. `attached`: what becomes of the request still depends on it. `admitted`: P has pages for the
    whole prompt.

    On D: `ready`: nothing else keeps the request from its queue; `wanted` are, per group, the entries that P may
    write; `proven` the end of those that digests have shown to be final; `quarantined` the pages that the request
    has given up.
    """

    request: Request
    attached: bool = True
    admitted: bool = False
    ready: bool = False
    wanted: dict[str, Interval] = field(default_factory=dict)
    proven: dict[str, int] = field(default_factory=dict)
    quarantined: BlockTables | None = None


class HandoffLegs:
    """Open legs of one engine by attempt."""

    def __init__(
        self,
        agent: Agent,
        vocab_size: int,
        num_drafts: int,
        recovery: Recovery,
        handoff_timeout_s: float,
        alter_seeds: Callable[[Seeds], Seeds] | None = None,
    ) -> None:
        """`alter_seeds` is the seam at which the `faulty` transport breaks seeds on purpose."""
        self.agent = agent
        self.alter_seeds = alter_seeds
        self.vocab_size = vocab_size
        self.num_drafts = num_drafts
        self.recovery = recovery
        self.handoff_timeout_s = handoff_timeout_s
        self.open: dict[AttemptKey, Leg] = {}
        self._recomputing: dict[Request, float] = {}  # with the time (monotonic) at which its old pages should be free
        self._core: EngineCore | None = None

    def bind(self, core: EngineCore) -> None:
        """The core whose requests these legs belong to."""
        self._core = core

    @property
    def core(self) -> EngineCore:
        assert self._core is not None
        return self._core

    def opened(self, request: Request) -> None:
        """A leg arrived. The other side may speak of it at any time, or is to know of it."""
        assert request.ticket is not None
        self.open[request.ticket.key] = Leg(request)
        if request.role == "prefill":
            self.agent.open_prefill(request.ticket)
        else:
            self.core.scheduler.announced[request] = None
            self.agent.announce_decode(request.ticket)

    def is_ready(self, request: Request) -> None:
        """A decode leg may enter its queue, once P has admitted it."""
        assert request.ticket is not None
        leg = self.open.get(request.ticket.key)
        if leg is not None:
            leg.ready = True
            self._enqueue(leg)

    def _enqueue(self, leg: Leg) -> None:
        """Pages go to legs that P has admitted, alone: those that it has no room for would never free them."""
        request, scheduler = leg.request, self.core.scheduler
        if leg.ready and leg.admitted and request in scheduler.announced:
            del scheduler.announced[request]
            scheduler.enqueue(request)

    def admitted(self, requests: Iterable[Request]) -> None:
        """Prefill legs that have their pages: D may look for its own."""
        for request in requests:
            leg = self.open.get(request.ticket.key) if request.ticket is not None else None
            if leg is not None and request.role == "prefill" and not leg.admitted:
                leg.admitted = True
                assert request.ticket is not None
                self.agent.admit_prefill(request.ticket.key)

    def start_receives(self, now: float) -> None:
        """Register decode legs for which there is room, in the order of their queue. `now`: monotonic seconds."""
        scheduler = self.core.scheduler
        self._expire_recomputing(now)
        while scheduler.receive_queue:
            request = scheduler.receive_queue[0]
            ticket = request.ticket
            assert ticket is not None
            destination = scheduler.start_receive(request)
            if destination is None:
                return
            scheduler.receive_queue.popleft()
            wanted = self.open[ticket.key].wanted = destination.wanted
            self.agent.open_decode(ticket, request.prefill_len, wanted, dict(request.kv.pages))

    def _expire_recomputing(self, now: float) -> None:
        """A request that finds no room for its recomputation may succeed elsewhere, where pages that a peer might still
        write are what is missing: nobody knows when they come back. Pages in use do."""
        for request, until in list(self._recomputing.items()):
            if request.status is not RequestStatus.WAITING:
                del self._recomputing[request]
            elif now >= until and any(pool.num_quarantined for pool in self.core.cache.pools.values()):
                del self._recomputing[request]
                self.core.finish(request, "error", "no_room: no pages came free to recompute", recoverable=True)

    def prefilled(self, request: Request) -> None:
        """After the drafter ran: declare what became final; with the last chunk, hand over the seeds."""
        assert request.ticket is not None
        key, n = request.ticket.key, request.prefill_len
        final = self._final(request, seeded=False)
        self.agent.declare_final(key, n, dict(request.kv.pages), final)
        if request.is_prefilling:
            return
        if request.finish_reason is None:
            # Else no drafter has run, and nothing is wanted.
            final = self._final(request, seeded=True)
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
        self.agent.finish_prefill(key, seeds, request.finish_reason is not None, final)

    def _final(self, request: Request, seeded: bool) -> dict[str, int]:
        """How far each group is final with the tokens of the prefill, and the next one where `seeded`."""
        n, cache = request.prefill_len, self.core.cache
        computed, drafted = min(request.num_computed, n), min(request.num_drafted, n)
        return {name: cache.num_final(name, n, computed, drafted, seeded=seeded) for name in cache.pools}

    def keeps_pages(self, request: Request, error: str | None) -> bool:
        """A request ended early: whether the agent must first prove its pages quiet. It is told to give up, and tells
        the other side."""
        leg = self.open.get(request.ticket.key) if request.ticket is not None else None
        if leg is None or not leg.attached:
            return False
        assert request.ticket is not None
        reason = "queue_timeout" if error is not None and error.startswith("queue_timeout") else "failed"
        self.agent.abort(request.ticket.key, "aborted" if request.finish_reason == "abort" else reason)
        if request.role == "decode":
            self._quarantine(leg)
        return True

    def abandon(self, request: Request) -> None:
        """The client of a computed prefill leg is gone. D may never have heard of the attempt, and then only this
        ends it before its ticket does."""
        assert request.ticket is not None
        self.core.requests.pop(request.request_id, None)
        request.finish_reason = "abort"
        self.agent.abort(request.ticket.key, "aborted")

    def handle(self, event: HandoffEvent) -> None:
        """An event of the agent, on the engine thread."""
        leg = self.open.get(event.key)
        if leg is None:
            return
        if isinstance(event, DecodeProgress):
            for name, stop in event.proven.items():
                leg.proven[name] = max(stop, leg.proven.get(name, 0))
        elif isinstance(event, DecodeFailed):
            self.core.metrics.handoff_failures[reason_label(event.reason)] += 1
            if self._receives(leg):
                self._failed(leg, f"{event.reason}: {event.message}", event.recoverable)
        elif isinstance(event, DecodeAdmitted):
            leg.admitted = True
            self._enqueue(leg)
        else:
            del self.open[event.key]
            self._ended(leg, event)

    def _ended(self, leg: Leg, event: PrefillReleased | DecodeCommitted | DecodeFinished | DecodeReleased) -> None:
        request, metrics = leg.request, self.core.metrics
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
            if self._receives(leg):
                self._take(leg, event.seeds, finished=False)
            else:
                # Aborted here while the commit was on its way: everything is in place, so the pages are quiet.
                self._leave_quarantine(leg)
        elif isinstance(event, DecodeFinished):
            metrics.num_handoffs["finished"] += 1
            if self._receives(leg):
                self._take(leg, event.seeds, finished=True)
            self._leave_quarantine(leg)
        elif isinstance(event, DecodeReleased):
            metrics.num_handoffs["released"] += 1
            self._leave_quarantine(leg)

    def _receives(self, leg: Leg) -> bool:
        return leg.attached and leg.request.status in (RequestStatus.WAITING, RequestStatus.RECEIVING)

    def _take(self, leg: Leg, seeds: Seeds, finished: bool) -> None:
        """Go on from the seeds, or end with them; the pages are quiet."""
        request = leg.request
        fault = self._fault(request, seeds, finished)
        if fault is not None:
            self.core.metrics.handoff_failures["bad_seeds"] += 1
            self._failed(leg, f"bad_seeds: {fault}", recoverable=True)
        elif finished:
            self.core.finished_elsewhere(request, seeds)
        else:
            self.core.committed(request, seeds)

    def _fault(self, request: Request, seeds: Seeds, finished: bool) -> str | None:
        """What is wrong with the seeds, if anything."""
        ids = [seeds.first_token, *seeds.draft_token_ids]
        if not all(0 <= i < self.vocab_size for i in ids) or len(seeds.draft_token_ids) > self.num_drafts:
            return "token ids out of range or too many drafts"
        if request.num_output > 0 and seeds.first_token != request.token_ids[request.prefill_len]:
            return "the first token is not the last one known"
        if request.num_output == 0 and request.params.logprobs is not None and seeds.first_logprobs is None:
            return "logprobs are missing"
        ends = until_stop(request, [seeds.first_token], self.core.eos_ids, self.core.max_model_len)[1] is not None
        if request.num_output == 0 and finished is not ends:
            return f"the first token ends the request: {ends}, the peer says {finished}"
        return None

    def _failed(self, leg: Leg, error: str, recoverable: bool) -> None:
        """A decode leg will get no commit: its request recomputes here where that is allowed, else it ends."""
        request, scheduler = leg.request, self.core.scheduler
        if not (recoverable and recovers(self.recovery, "recompute")):
            self.core.finish(request, "error", error, recoverable)
            return
        assert request.ticket is not None
        self.core.metrics.recoveries["recompute"] += 1
        if request.ticket.key in self.open:
            self._quarantine(leg)
        else:
            scheduler.release(request)
        leg.attached = False
        scheduler.recompute(request)
        self._recomputing[request] = time.monotonic() + self.handoff_timeout_s

    def _quarantine(self, leg: Leg) -> None:
        """The request lets go of its pages, but P may still write them."""
        leg.quarantined = self.core.scheduler.quarantine(leg.request, leg.wanted)

    def _leave_quarantine(self, leg: Leg) -> None:
        """The pages are quiet. Those with proven bytes stay, as a prefix from which a recomputation may start."""
        if leg.quarantined is not None:
            self.core.cache.leave_quarantine(leg.quarantined, leg.request.token_ids, leg.proven)
            leg.quarantined = None

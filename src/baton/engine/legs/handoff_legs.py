"""Connects requests with the handoff agent: legs, destination pages, and when pages may be freed.

Runs on the engine thread. Calls and events return effects on requests for the core to carry out. A leg's pages are
released exactly once (docs/lifecycle.md, "Who frees a page"). After a failed handoff the request continues at once,
with other pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.clock import Clock, SystemClock
from baton.engine.legs.layer_stream import LayerStream
from baton.engine.legs.leg import Effect, Leg, LegSettings, LegStatus, PagesReleased, RequestFailed, SeedsArrived
from baton.engine.legs.prefix_legs import PrefixLegs
from baton.engine.metrics import EngineMetrics
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduler import Scheduler
from baton.errors import reason_label
from baton.handoff.agent.leg_events import Agent
from baton.handoff.protocol.events import (
    Declared,
    DecodeAdmitted,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeProgress,
    DecodeReleased,
    HandoffEvent,
    PrefillReleased,
    Sampled,
)
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.wire import allows_recovery

# Failure reasons that are sent to the peer's engine; others are `failed`.
_PEER_REASONS = ("queue_timeout", "nonfinite_logits")


class HandoffLegs:
    def __init__(
        self,
        agent: Agent,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        ends: Callable[[Request, int], bool],
        settings: LegSettings,
        clock: Clock | None = None,
        layers: LayerStream | None = None,
        alter_seeds: Callable[[Seeds], Seeds] | None = None,
    ) -> None:
        """`ends(request, token)`: whether `token` would end the request. `layers`: reports layers of a forward.
        `alter_seeds`: by which the `faulty` transport corrupts seeds.
        """
        self.agent, self.scheduler, self.cache, self.metrics = agent, scheduler, scheduler.cache, metrics
        self.alter_seeds, self.layers = alter_seeds, layers
        self._clock = clock or SystemClock()
        self._ends = ends
        self.settings = settings
        self.prefixes = PrefixLegs(agent, self.cache)
        self.open: dict[AttemptKey, Leg] = {}
        self._recomputing: dict[Request, float] = {}  # when its old pages should be free, in monotonic seconds

    def open_leg(self, request: Request) -> None:
        """Pass a new leg to the agent. D may ask for a prefill leg at any time; a decode leg is announced to P."""
        assert request.ticket is not None
        self.open[request.ticket.key] = Leg(request)
        if request.prefix_len is not None and request.role == "prefill":
            self.prefixes.offer(request)
        elif request.role == "prefill":
            self.agent.open_prefill(request.ticket)
        else:
            if request.prefix_len is None:
                self.scheduler.announced[request] = None
            request.times.mark("announced", self._clock.monotonic())
            self.agent.announce_decode(request.ticket)

    def set_ready(self, request: Request) -> None:
        """The request of a decode leg waits only for P's admission."""
        assert request.ticket is not None
        leg = self.open.get(request.ticket.key)
        if leg is not None:
            leg.step("ready")
            self._enqueue(leg)

    def _enqueue(self, leg: Leg) -> None:
        """Queue a leg for pages once P has admitted it. An earlier one could not be committed, and would keep its pages
        from legs that can.
        """
        request, scheduler = leg.request, self.scheduler
        if leg.phase is LegStatus.QUEUED and request in scheduler.announced:
            del scheduler.announced[request]
            scheduler.enqueue(request)

    def admit(self, requests: Iterable[Request]) -> None:
        """Post prefill legs that have their pages, so that D allocates its own."""
        for request in requests:
            leg = self.open.get(request.ticket.key) if request.ticket is not None else None
            if leg is not None and request.role == "prefill" and leg.phase is LegStatus.OPENED:
                leg.step("admitted")
                assert request.ticket is not None
                self.agent.admit_prefill(request.ticket.key)

    def start_receives(self) -> None:
        """In queue order, while there is room."""
        scheduler = self.scheduler
        while scheduler.receive_queue:
            request = scheduler.receive_queue[0]
            ticket = request.ticket
            assert ticket is not None
            leg = self.open[ticket.key]
            destination = scheduler.start_receive(request, leg.sent_groups)
            if destination is None:
                break
            scheduler.receive_queue.popleft()
            leg.wanted, leg.registered = destination.wanted, self._clock.monotonic()
            request.times.mark("registered", leg.registered)
            pages = {name: request.kv.pages[name] for name in leg.wanted}
            self.agent.open_decode(ticket, request.prefill_len, leg.wanted, pages)

    def expire_recomputing(self, now: float) -> list[Effect]:
        """Fail requests that found no pages to recompute for `handoff_timeout_s` while pages are in quarantine: these
        may not be released, and another engine may be faster. While all pages are in use, requests wait. `now`:
        monotonic seconds.
        """
        effects: list[Effect] = []
        for request, until in list(self._recomputing.items()):
            if request.status is not RequestStatus.WAITING:
                del self._recomputing[request]
            elif now >= until and any(pool.num_quarantined for pool in self.cache.pools.values()):
                del self._recomputing[request]
                effects.append(RequestFailed(request, "no_room: no pages came free to recompute", recoverable=True))
        return effects

    def declare(self, request: Request) -> None:
        """Declare what became final of a prefill leg, and with its last chunk hand over the seeds."""
        assert request.ticket is not None
        key, n = request.ticket.key, request.prefill_len
        if self.settings.kv_stream == "off" and request.is_prefilling:
            return
        final = self._final(request, seeded=False)
        # The request's tables grow.
        tables = {group: list(table) for group, table in self.cache.offered(request.kv, n).items()}
        self.agent.post(key, Declared(n, tables, final))
        if request.is_prefilling:
            return
        if request.finish_reason is None:
            # If the request has ended, no drafter has run, and D wants nothing.
            final = self._final(request, seeded=True)
        mtp_hidden = request.mtp_hidden if request.finish_reason is None else None
        seeds = Seeds(
            first_token=request.token_ids[n],
            first_logprobs=request.first_logprobs,
            draft_token_ids=list(request.draft_ids),
            drafter_states=b"" if mtp_hidden is None else mtp_hidden.astype("<f4").tobytes(),
        )
        if self.alter_seeds is not None:
            seeds = self.alter_seeds(seeds)
        self.agent.post(key, Sampled(seeds, request.finish_reason is not None, final))

    def _final(self, request: Request, seeded: bool) -> dict[str, int]:
        """Final tokens per group, if the prefill's tokens are known, and with `seeded` the next one."""
        n, cache = request.prefill_len, self.cache
        computed, drafted = min(request.num_computed, n), min(request.num_drafted, n)
        return {name: cache.num_final(name, n, computed, drafted, seeded=seeded) for name in cache.pools}

    def abort_leg(self, request: Request, error: str | None) -> bool:
        """Abort the leg of a request that ended early. True if its pages must wait until proven quiet."""
        leg = self.open.get(request.ticket.key) if request.ticket is not None else None
        if leg is None or not leg.attached:
            return False
        assert request.ticket is not None
        reason = (error or "").partition(":")[0]
        reason = reason if reason in _PEER_REASONS else "failed"
        self.agent.abort(request.ticket.key, "aborted" if request.finish_reason == "abort" else reason)
        if request.role == "decode":
            self._quarantine(leg)
        return True

    def abandon(self, request: Request) -> None:
        """Abort a computed prefill leg whose client is gone. If D does not know the leg, only its ticket's expiry would
        end it.
        """
        assert request.ticket is not None
        self.agent.abort(request.ticket.key, "aborted")

    # ------------------------------------------------------------ the agent's events

    def handle(self, event: HandoffEvent) -> list[Effect]:
        leg = self.open.get(event.key)
        if leg is None:
            return []
        match event:
            case DecodeProgress():
                for name, stop in event.proven.items():
                    leg.proven[name] = max(stop, leg.proven.get(name, 0))
                return []
            case DecodeAdmitted():
                return self._admitted(leg, event)
            case DecodeFailed():
                return self._handoff_failed(leg, event)
            case PrefillReleased():
                del self.open[event.key]
                return self._prefill_released(leg, event)
            case DecodeCommitted() | DecodeFinished():
                del self.open[event.key]
                return self._received(leg, event)
            case DecodeReleased():
                del self.open[event.key]
                self.metrics.num_handoffs["released"] += 1
                self._leave_quarantine(leg)
                return []

    def _admitted(self, leg: Leg, event: DecodeAdmitted) -> list[Effect]:
        leg.step("admitted")
        leg.sent_groups = event.groups
        if leg.request.prefix_len is not None:
            return self.prefixes.place(leg)
        leg.request.times.mark("admitted", self._clock.monotonic())
        self._enqueue(leg)
        return []

    def _handoff_failed(self, leg: Leg, event: DecodeFailed) -> list[Effect]:
        self.metrics.handoff_failures[reason_label(event.reason)] += 1
        if event.reason == "nonfinite_logits":
            leg.proven.clear()  # the bytes equal P's, which are wrong
        if not self._receives(leg):
            return []
        error = f"{event.reason}: {event.message}"
        if leg.request.prefix_len is not None:
            return [RequestFailed(leg.request, error, event.recoverable)]
        return self._failed(leg, error, event.recoverable)

    def _received(self, leg: Leg, event: DecodeCommitted | DecodeFinished) -> list[Effect]:
        """The pages are quiet, even if the request was aborted before the commit."""
        receives = self._receives(leg)
        if receives and leg.request.prefix_len is not None:
            return self.prefixes.take(leg, event, self.metrics)
        if isinstance(event, DecodeCommitted):
            self._measure_commit(leg, event)
        else:
            self.metrics.num_handoffs["finished"] += 1
        if receives:
            return self._take(leg, event.seeds, finished=isinstance(event, DecodeFinished))
        self._leave_quarantine(leg)
        return []

    def _prefill_released(self, leg: Leg, event: PrefillReleased) -> list[Effect]:
        request = leg.request
        self.metrics.num_handoffs[event.outcome] += request.prefix_len is None
        if request.status in (RequestStatus.WAITING, RequestStatus.RUNNING):
            return [RequestFailed(request, f"handoff_failed: {event.outcome}")]
        return [PagesReleased(request)]

    def _measure_commit(self, leg: Leg, event: DecodeCommitted) -> None:
        metrics, request, now = self.metrics, leg.request, self._clock.monotonic()
        metrics.num_handoffs["committed"] += 1
        metrics.handoff_bytes += event.num_bytes
        metrics.handoff_runs += event.num_runs
        metrics.register_to_commit.observe(now - leg.registered)
        for name, time in zip(("first_bytes", "last_bytes"), event.copied or (), strict=False):
            request.times.mark(name, time)
        request.times.mark("committed", now)
        request.times.num_bytes, request.times.num_runs = event.num_bytes, event.num_runs
        request.times.integrity = self.settings.integrity

    def _receives(self, leg: Leg) -> bool:
        return leg.attached and leg.request.status in (RequestStatus.WAITING, RequestStatus.RECEIVING)

    def _take(self, leg: Leg, seeds: Seeds, finished: bool) -> list[Effect]:
        """Continue from the seeds, or end with them. The pages are quiet."""
        fault = self._fault(leg.request, seeds, finished)
        if fault is None:
            return [SeedsArrived(leg.request, seeds, finished)]
        self.metrics.handoff_failures["bad_seeds"] += 1
        return self._failed(leg, f"bad_seeds: {fault}", recoverable=True)

    def _fault(self, request: Request, seeds: Seeds, finished: bool) -> str | None:
        drafts = seeds.draft_token_ids
        in_range = all(0 <= i < self.settings.vocab_size for i in (seeds.first_token, *drafts))
        if not in_range or len(drafts) > self.settings.max_drafts:
            return "token ids out of range or too many drafts"
        if request.num_output > 0 and seeds.first_token != request.token_ids[request.prefill_len]:
            return "the first token is not the last one known"
        # A drafter that starts cold takes no states; an ended request has none.
        num_bytes = 0 if finished or request.draft_prefix_len is not None else self.settings.drafter_state_bytes
        if num_bytes and len(seeds.drafter_states) != num_bytes:
            return f"the drafter's states have {len(seeds.drafter_states)} bytes, not {num_bytes}"
        if request.num_output == 0 and request.params.logprobs is not None and seeds.first_logprobs is None:
            return "logprobs are missing"
        # A request that resumes with known tokens did not end with one of them.
        ends = request.num_output == 0 and self._ends(request, seeds.first_token)
        if finished is not ends:
            return f"the first token ends the request: {ends}, the peer says {finished}"
        return None

    def _failed(self, leg: Leg, error: str, recoverable: bool) -> list[Effect]:
        """Recompute the request here if allowed, else end it."""
        request, scheduler = leg.request, self.scheduler
        if not (recoverable and allows_recovery(self.settings.recovery, "recompute")):
            return [RequestFailed(request, error, recoverable)]
        assert request.ticket is not None
        self.metrics.recoveries["recompute"] += 1
        if request.ticket.key in self.open:
            self._quarantine(leg)
        else:
            scheduler.release(request)
        leg.step("detach")
        request.handoff_error = error
        scheduler.recompute(request)
        self._recomputing[request] = self._clock.monotonic() + self.settings.handoff_timeout_s
        return []

    def _quarantine(self, leg: Leg) -> None:
        leg.quarantined = self.scheduler.quarantine(leg.request, leg.wanted)

    def _leave_quarantine(self, leg: Leg) -> None:
        """As `KVCache.leave_quarantine`."""
        if leg.quarantined is not None:
            self.cache.leave_quarantine(leg.quarantined, leg.request.token_ids, leg.proven)
            leg.quarantined = None

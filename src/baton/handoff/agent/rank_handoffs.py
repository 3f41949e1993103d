"""All handoffs of one rank: events of its engine, and timers. Not thread-safe (`agent.py`), except `stats`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from baton.handoff.agent.attempts import DecodeAttempt
from baton.handoff.agent.leg_events import Agent, DecodeLeg, DecodePages, GiveUp, LegEvent, PrefillLeg
from baton.handoff.agent.machine_runner import MachineRunner, OnPeer
from baton.handoff.agent.routing import Routing
from baton.handoff.agent.stats import AgentStats
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.digests import Digester
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.ticket import SignedTicket
from baton.handoff.session.base import Worker
from baton.handoff.session.sessions import Sessions
from baton.transports.base import Transport

log = logging.getLogger(__name__)


class RankHandoffs(Agent):
    """`digester` and `worker` are required unless `config.integrity` is off."""

    def __init__(
        self,
        sessions: Sessions,
        instance: Instance,
        transport: Transport,
        on_event: Callable[[ev.HandoffEvent], None],
        digester: Digester | None = None,
        worker: Worker | None = None,
        on_peer: OnPeer | None = None,
    ) -> None:
        self.sessions = sessions
        self.config, self.channel, self.clock = sessions.config, sessions.channel, sessions.clock
        self.rank = instance.rank
        self.runner = MachineRunner(sessions, instance, transport, on_event, digester, worker, on_peer)
        self.routing = Routing(self.runner)
        self.on_message = self.routing.on_message
        self.operations = self.runner.operations
        self._last_time: float | None = None
        self._checked = 0.0

    def post(self, key: AttemptKey, event: LegEvent) -> None:
        match event:
            case PrefillLeg(ticket):
                self._begin_prefill(key, ticket)
            case DecodeLeg(ticket):
                self._begin_decode(key, ticket)
            case DecodePages():
                self._place(key, event)
            case GiveUp(reason, message, taken):
                given_up = ev.Abort(reason, message)
                for attempt in (self.runner.prefills.get(key), self.runner.decodes.get(key)):
                    if attempt is not None:
                        self.runner.feed(attempt, given_up)
                if taken is not None:
                    taken()
            case _:
                if (prefill := self.runner.prefills.get(key)) is not None:
                    if isinstance(event, ev.PagesGiven):
                        prefill.on_admitted(self.clock.monotonic())
                    self.runner.feed(prefill, event)

    def knows(self, key: AttemptKey) -> bool:
        """Whether P has an attempt, from its engine or from D. Thread-safe."""
        return bool(self.runner.prefills.same_transfer(key))

    def _begin_prefill(self, key: AttemptKey, ticket: SignedTicket) -> None:
        registrations = self.routing.registrations
        attempt = registrations.prefill(key, ticket)
        registrations.supersede(key)
        self.runner.feed(attempt, ev.Opened())
        if attempt.machine.begun_with(ticket.text):
            return
        # D's claim may belong to another request.
        log.warning("attempt %s: the ticket of P's leg is not that of D's", key)
        self.runner.feed(attempt, ev.Fault("register_refused", "both legs must have one ticket"))

    def _begin_decode(self, key: AttemptKey, ticket: SignedTicket, pages: DecodePages | None = None) -> None:
        if self.runner.decodes.get(key) is not None:
            log.warning("attempt %s is open already", key)
            return
        retries, integrity = self.config.max_retries, self.config.integrity
        wanted, tables = (None, None) if pages is None else (pages.wanted, pages.pages)
        machine = DecodeHandoff(key, ticket.mode, ticket.text, wanted, tables, retries, integrity)
        expiry = self.routing.registrations.expiry(ticket, "decode")
        addresses = ticket.prefill_addresses
        attempt = DecodeAttempt(expiry, machine=machine, address=addresses[key.source_rank], num_sources=len(addresses))
        if pages is not None:
            attempt.on_placed(self.clock.monotonic(), pages.admitted)
        self.runner.decodes.add(key, attempt)
        self.routing.decode.dial(attempt, ticket)

    def _place(self, key: AttemptKey, event: DecodePages) -> None:
        attempt = self.runner.decodes.get(key)
        if attempt is None:
            self._begin_decode(key, event.ticket, event)
        elif not attempt.machine.takes_pages:
            log.warning("attempt %s is open already", key)
        else:
            attempt.on_placed(self.clock.monotonic(), event.admitted)
            self.runner.feed(attempt, ev.Placed(event.wanted, event.pages))

    def abort_all(self) -> None:
        self.runner.send_acks(math.inf)
        for attempt in self.runner.live():
            self.runner.feed(attempt, ev.Abort("engine_closed", "the engine is closing"))

    def poll(self) -> None:
        for session in self.sessions.poll():
            self.routing.on_connected(session)
        self.runner.poll()

    # ------------------------------------------------------------ time

    def run_timers(self) -> float:
        """Returns the seconds until the next call."""
        now, timers = self.clock.monotonic(), self.config.timers
        if self._last_time is not None and now - self._last_time > timers.lease / 2:
            self.sessions.restart_leases(now)
        self._last_time = now
        if now >= self._checked + timers.check:
            self._checked = now
            self._check(now)
        next_ack = self.runner.send_acks(now)
        self.runner.tick(now)
        self.sessions.repeat_hello(now)
        self.sessions.renew(now)
        live = self.runner.live()
        if not live and not self.routing.registrations.holding:
            return max(0.0, min(self.sessions.until_renew(now), timers.renew, timers.retry, next_ack - now))
        due = min([self._checked + timers.check, next_ack, *(attempt.next_tick for attempt in live)])
        return max(0.0, due - now)

    def _check(self, now: float) -> None:
        timers, runner = self.config.timers, self.runner
        for attempt in runner.live():
            if now >= attempt.deadline(timers.handoff) and not attempt.machine.closing:
                runner.feed(attempt, ev.Deadline())
        self.routing.registrations.retry()
        self.routing.evict(now)
        for attempt in runner.live():
            if (
                attempt.peer is not None
                and not attempt.peer.alive()
                and (attempt.fenced or not attempt.machine.closing)
            ):
                runner.fail(attempt, "peer_lost", "the peer engine died")
        self.routing.drop_dead()
        self.routing.decode.close_idle(now)
        self.sessions.sweep([peer for attempt in runner.live() for peer in attempt.peers])
        # A REGISTER delayed past its ticket's expiry is refused, so the tombstone may go.
        runner.prefills.forget(now, timers.retry)
        runner.decodes.forget(now, timers.retry)

    def stats(self) -> AgentStats:
        """Metrics, without those of sockets. Thread-safe."""
        live = self.runner.live()
        return self.runner.counters.snapshot(
            self.operations.stats,
            outstanding=len(live),
            quarantined=sum(attempt.machine.closing for attempt in live),
            unknown=self.operations.num_unknown,
            sessions=self.sessions.num_ready,
            malformed=self.channel.malformed,
        )

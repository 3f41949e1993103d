"""One engine's halves of all its handoffs: the engine's calls, and what time brings.

Sessions are in `channel.sessions`, what peers say in `routing`, the state machines in `execution`. All methods but
`stats` are for one thread; `agent.py` provides it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from baton.handoff.channel.base import Clock, Connection, ControlChannel, Worker
from baton.handoff.channel.config import AgentConfig
from baton.handoff.channel.sessions import Sessions
from baton.handoff.node.attempts import DecodeAttempt
from baton.handoff.node.execution import Execution
from baton.handoff.node.routing import Routing
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.digests import Digester
from baton.handoff.protocol.messages import AttemptKey, Message
from baton.handoff.protocol.ticket import SignedTicket, Ticket
from baton.kv.interval import Interval
from baton.transports.base import Transport

log = logging.getLogger(__name__)


class HandoffNode:
    """`digester` digests this engine's pages, on `worker`; without them, `config.integrity` must be off."""

    def __init__(
        self,
        config: AgentConfig,
        instance: Instance,
        transport: Transport,
        descriptor: bytes,
        channel: ControlChannel,
        on_event: Callable[[ev.HandoffEvent], None],
        clock: Clock,
        digester: Digester | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.config = config
        self.channel = channel
        self.clock = clock
        self.sessions = Sessions(config, instance, transport, descriptor, channel, clock)
        self.execution = Execution(
            config, instance, transport, channel, self.sessions, on_event, clock, digester, worker
        )
        self.routing = Routing(config, instance, channel, self.sessions, self.execution, clock)
        self.operations = self.execution.operations
        self._last_time: float | None = None
        self._checked = 0.0

    # ------------------------------------------------------------ the engine's calls

    def open_prefill(self, ticket: Ticket) -> None:
        """The engine took P's leg."""
        attempt = self.routing.claims.prefill(ticket.key, ticket.mode, self.routing.claims.expiry(ticket, "prefill"))
        self.routing.claims.supersede(ticket.key)
        self.execution.feed(attempt, ev.Opened())

    def announce_decode(self, ticket: SignedTicket) -> None:
        """The engine took D's leg, and has no destination pages yet."""
        if self.execution.decodes.get(ticket.key) is not None:
            log.warning("attempt %s is open already", ticket.key)
            return
        self._decode(ticket)

    def open_decode(self, ticket: SignedTicket, wanted: dict[str, Interval], pages: dict[str, list[int]]) -> None:
        """The engine has destination pages for D's leg, announced or not."""
        attempt = self.execution.decodes.get(ticket.key)
        if attempt is None:
            self._decode(ticket, wanted, pages)
        elif attempt.machine.placed:
            log.warning("attempt %s is open already", ticket.key)
        else:
            attempt.begun = self.clock.monotonic()
            self.execution.feed(attempt, ev.Placed(wanted, pages))

    def _decode(
        self,
        ticket: SignedTicket,
        wanted: dict[str, Interval] | None = None,
        pages: dict[str, list[int]] | None = None,
    ) -> None:
        retries, integrity = self.config.max_retries, self.config.integrity
        machine = DecodeHandoff(ticket.key, ticket.mode, ticket.text, wanted, pages, retries, integrity)
        expiry = self.routing.claims.expiry(ticket, "decode")
        attempt = DecodeAttempt(expiry, machine=machine, address=ticket.prefill_address)
        if wanted is not None:
            attempt.begun = self.clock.monotonic()
        self.execution.decodes.add(ticket.key, attempt)
        self.routing.dial(attempt, ticket)

    def to_prefill(self, key: AttemptKey, event: ev.MachineEvent) -> None:
        """An event of the engine for P's half; nothing happens when it is unknown or over."""
        attempt = self.execution.prefills.get(key)
        if attempt is not None:
            self.execution.feed(attempt, event)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """The engine gives up on its half."""
        event = ev.Abort(reason, "given up by the engine")
        self.to_prefill(key, event)
        attempt = self.execution.decodes.get(key)
        if attempt is not None:
            self.execution.feed(attempt, event)

    def abort_all(self, reason: str) -> None:
        """Give up on every live attempt."""
        for attempt in self.execution.live():
            self.execution.feed(attempt, ev.Abort(reason, "the engine is closing"))

    # ------------------------------------------------------------ what comes from outside

    def on_message(self, connection: Connection, message: Message) -> None:
        """One message. What is not allowed is counted and dropped; it never raises `ProtocolError`."""
        self.routing.on_message(connection, message)

    def poll(self) -> None:
        """Take in what has ended since the last call: connections, copies, digests."""
        for session in self.sessions.poll():
            self.routing.connected(session)
        self.execution.poll()

    # ------------------------------------------------------------ time

    def on_time(self) -> float:
        """Do what is due; returns the seconds after which it must be called again."""
        now, timers = self.clock.monotonic(), self.config.timers
        if self._last_time is not None and now - self._last_time > timers.lease / 2:
            self.sessions.forgive(now)
        self._last_time = now
        if now >= self._checked + timers.check:
            self._checked = now
            self._check(now)
        self.execution.tick(now)
        self.sessions.repeat_hello(now)
        self.sessions.renew(now)
        live = self.execution.live()
        if not live and not self.routing.claims.holding:
            return min(timers.renew, timers.retry)
        due = min([self._checked + timers.check, *(attempt.next_tick for attempt in live)])
        return max(0.0, due - now)

    def _check(self, now: float) -> None:
        """Deadlines, held REGISTERs, and peers that died or fell silent."""
        timers, execution = self.config.timers, self.execution
        for attempt in execution.live():
            if now >= attempt.deadline(timers.handoff) and not attempt.expired:
                attempt.expired = True
                execution.feed(attempt, ev.Deadline())
        self.routing.claims.retry()
        self.routing.evict(now)
        for attempt in execution.live():
            if attempt.peer is not None and not attempt.peer.alive() and (attempt.fenced or not attempt.closing):
                execution.lose(attempt, "peer_lost", "the peer engine died")
        self.routing.drop_dead()
        self.sessions.sweep([peer for attempt in execution.live() for peer in attempt.peers])
        # A REGISTER delayed past its ticket's end is refused by the ticket, so the tombstone may go.
        execution.prefills.forget(now, timers.retry)
        execution.decodes.forget(now, timers.retry)

    def stats(self) -> dict[str, Any]:
        """See `HandoffAgent.stats`. Any thread."""
        live = self.execution.live()
        return {
            **self.execution.figures.snapshot(),
            "outstanding": len(live),
            "quarantined": sum(attempt.closing for attempt in live),
            "unknown": self.operations.num_unknown,
            "sessions": self.sessions.num_ready,
            "malformed": self.channel.malformed,
        }

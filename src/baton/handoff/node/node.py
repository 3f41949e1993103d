"""One engine's halves of all its handoffs: the engine's calls, and what time brings.

Sessions are in `links.py`, what peers say in `inbox.py`, the state machines in `machines.py`. All methods but
`stats` are for one thread; `agent.py` provides it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from baton.handoff.channel.base import Clock, Connection, ControlChannel, Worker
from baton.handoff.channel.config import AgentConfig
from baton.handoff.channel.sessions import Links
from baton.handoff.node.attempts import DecodeAttempt
from baton.handoff.node.execution import Machines
from baton.handoff.node.inbox import Inbox
from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.digests import Digester
from baton.handoff.protocol.messages import AttemptKey, Message
from baton.handoff.protocol.ticket import Ticket, mint
from baton.transports.base import Transport

log = logging.getLogger(__name__)


class HandoffRunner:
    """`digester` digests this engine's pages, on `worker`; without them, `config.integrity` must be off."""

    def __init__(
        self,
        config: AgentConfig,
        geometries: Mapping[str, RankGeometry],
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
        self.links = Links(config, geometries, transport, descriptor, channel, clock)
        self.machines = Machines(config, geometries, transport, channel, self.links, on_event, clock, digester, worker)
        self.inbox = Inbox(config, geometries, channel, self.links, self.machines, clock)
        self.operations = self.machines.operations
        self._last_time: float | None = None
        self._checked = 0.0

    # ------------------------------------------------------------ the engine's calls

    def open_prefill(self, ticket: Ticket) -> None:
        """The engine took P's leg."""
        attempt = self.inbox.claims.prefill(ticket.key, ticket.mode, self.inbox.claims.expiry(ticket, "prefill"))
        self.inbox.claims.supersede(ticket.key)
        self.machines.feed(attempt, ev.Opened())

    def announce_decode(self, ticket: Ticket) -> None:
        """The engine took D's leg, and has no destination pages yet."""
        if self.machines.decodes.get(ticket.key) is not None:
            log.warning("attempt %s is open already", ticket.key)
            return
        self._decode(ticket)

    def open_decode(self, ticket: Ticket, wanted: dict[str, tuple[int, int]], pages: dict[str, list[int]]) -> None:
        """The engine has destination pages for D's leg, announced or not."""
        attempt = self.machines.decodes.get(ticket.key)
        if attempt is None:
            self._decode(ticket, wanted, pages)
        elif attempt.machine.placed:
            log.warning("attempt %s is open already", ticket.key)
        else:
            attempt.begun = self.clock.monotonic()
            self.machines.feed(attempt, ev.Placed(wanted, pages))

    def _decode(
        self,
        ticket: Ticket,
        wanted: dict[str, tuple[int, int]] | None = None,
        pages: dict[str, list[int]] | None = None,
    ) -> None:
        config = self.config
        signed = mint(config.ticket_key, ticket)
        machine = DecodeHandoff(ticket.key, ticket.mode, signed, wanted, pages, config.max_retries, config.integrity)
        expiry = self.inbox.claims.expiry(ticket, "decode")
        attempt = DecodeAttempt(expiry, machine=machine, address=ticket.prefill_address)
        if wanted is not None:
            attempt.begun = self.clock.monotonic()
        self.machines.decodes.add(ticket.key, attempt)
        self.inbox.dial(attempt, ticket)

    def to_prefill(self, key: AttemptKey, event: ev.MachineEvent) -> None:
        """An event of the engine for P's half; nothing happens when it is unknown or over."""
        attempt = self.machines.prefills.get(key)
        if attempt is not None:
            self.machines.feed(attempt, event)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """The engine gives up on its half."""
        event = ev.Abort(reason, "given up by the engine")
        self.to_prefill(key, event)
        attempt = self.machines.decodes.get(key)
        if attempt is not None:
            self.machines.feed(attempt, event)

    def abort_all(self, reason: str) -> None:
        """Give up on every live attempt."""
        for attempt in self.machines.live():
            self.machines.feed(attempt, ev.Abort(reason, "the engine is closing"))

    # ------------------------------------------------------------ what comes from outside

    def on_message(self, connection: Connection, message: Message) -> None:
        """One message. What is not allowed is counted and dropped; it never raises `ProtocolError`."""
        self.inbox.on_message(connection, message)

    def poll(self) -> None:
        """Take in what has ended since the last call: connections, copies, digests."""
        for link in self.links.poll():
            self.inbox.connected(link)
        self.machines.poll()

    # ------------------------------------------------------------ time

    def on_time(self) -> float:
        """Do what is due; returns the seconds after which it must be called again."""
        now, timers = self.clock.monotonic(), self.config.timers
        if self._last_time is not None and now - self._last_time > timers.lease / 2:
            self.links.forgive(now)
        self._last_time = now
        if now >= self._checked + timers.check:
            self._checked = now
            self._check(now)
        self.machines.tick(now)
        self.links.repeat_hello(now)
        self.links.renew(now)
        live = self.machines.live()
        if not live and not self.inbox.claims.holding:
            return min(timers.renew, timers.retry)
        due = min([self._checked + timers.check, *(attempt.next_tick for attempt in live)])
        return max(0.0, due - now)

    def _check(self, now: float) -> None:
        """Deadlines, held REGISTERs, and peers that died or fell silent."""
        timers, machines = self.config.timers, self.machines
        for attempt in machines.live():
            if now >= attempt.deadline(timers.handoff) and not attempt.expired:
                attempt.expired = True
                machines.feed(attempt, ev.Deadline())
        self.inbox.claims.retry()
        self.inbox.evict(now)
        for attempt in machines.live():
            if attempt.peer is not None and not attempt.peer.alive() and (attempt.fenced or not attempt.closing):
                machines.lose(attempt, "peer_lost", "the peer engine died")
        self.inbox.drop_dead()
        self.links.sweep([peer for attempt in machines.live() for peer in attempt.peers])
        # A REGISTER delayed past its ticket's end is refused by the ticket, so the tombstone may go.
        machines.prefills.forget(now, timers.retry)
        machines.decodes.forget(now, timers.retry)

    def stats(self) -> dict[str, Any]:
        """See `HandoffAgent.stats`. Any thread."""
        live = self.machines.live()
        return {
            **self.machines.figures.snapshot(),
            "outstanding": len(live),
            "quarantined": sum(attempt.closing for attempt in live),
            "unknown": self.operations.num_unknown,
            "sessions": self.links.num_ready,
            "malformed": self.channel.malformed,
        }

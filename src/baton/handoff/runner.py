"""Runs the machines of one engine: routes messages and ends of copies to them, and carries out their actions.

All methods but `stats` are for one thread; `agent.py` provides it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from baton.errors import ProtocolError
from baton.handoff import events as ev
from baton.handoff.attempts import Book, DecodeAttempt, Figures, PrefillAttempt
from baton.handoff.decode import DecodeHandoff
from baton.handoff.environment import Clock, Connection, ControlChannel
from baton.handoff.links import AgentConfig, Link, Links
from baton.handoff.messages import AttemptKey, AttemptMessage, Bye, Cancel, Hello, Message, Nack, Register
from baton.handoff.operations import Operations
from baton.handoff.planner import RankGeometry
from baton.handoff.prefill import PrefillHandoff
from baton.handoff.ticket import MAX_TICKET_LIFE_S, Ticket, mint
from baton.transports.base import Transport

log = logging.getLogger(__name__)
Attempt = PrefillAttempt | DecodeAttempt


class HandoffRunner:
    """The engine's halves of all its handoffs."""

    def __init__(
        self,
        config: AgentConfig,
        geometries: Mapping[str, RankGeometry],
        transport: Transport,
        descriptor: bytes,
        channel: ControlChannel,
        on_event: Callable[[ev.HandoffEvent], None],
        clock: Clock,
    ) -> None:
        self.config = config
        self.geometries = dict(geometries)
        self.channel = channel
        self.on_event = on_event
        self.clock = clock
        self.links = Links(config, geometries, transport, descriptor, channel, clock)
        self.operations: Operations[Attempt] = Operations(transport)
        self.prefills: Book[PrefillAttempt] = Book()
        self.decodes: Book[DecodeAttempt] = Book()
        self.figures = Figures()
        self._queue: deque[tuple[Attempt, ev.MachineEvent]] = deque()
        self._running = False
        # A REGISTER whose transfer has an earlier attempt that is not quiet yet waits here.
        self._held: list[tuple[Link, Register]] = []
        self._next_check = self._next_retry = 0.0

    # ------------------------------------------------------------ the engine's calls

    def open_prefill(self, ticket: Ticket) -> None:
        """The engine took P's leg."""
        attempt = self._prefill(ticket.key, ticket.mode, self._deadline(ticket))
        self._supersede(ticket.key)
        self._feed(attempt, ev.Opened())

    def open_decode(self, ticket: Ticket, wanted: dict[str, tuple[int, int]], pages: dict[str, list[int]]) -> None:
        """The engine took D's leg and has destination pages."""
        if self.decodes.get(ticket.key) is not None:
            log.warning("attempt %s is open already", ticket.key)
            return
        link = self.links.server(ticket)
        machine = DecodeHandoff(ticket.key, ticket.mode, mint(self.config.ticket_key, ticket), wanted, pages)
        attempt = self.decodes.add(ticket.key, DecodeAttempt(machine, self._deadline(ticket), link))
        if link.hello is not None:
            self._join(attempt, link.hello)

    def to_prefill(self, key: AttemptKey, event: ev.MachineEvent) -> None:
        """An event of the engine for P's half; nothing happens when it is unknown or over."""
        attempt = self.prefills.get(key)
        if attempt is not None:
            self._feed(attempt, event)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """The engine gives up on its half."""
        event = ev.Abort(reason, "given up by the engine")
        self.to_prefill(key, event)
        attempt = self.decodes.get(key)
        if attempt is not None:
            self._feed(attempt, event)

    def abort_all(self, reason: str) -> None:
        """Give up on every live attempt."""
        for attempt in self._live():
            self._feed(attempt, ev.Abort(reason, "the engine is closing"))

    def _deadline(self, ticket: Ticket) -> float:
        return self.clock.monotonic() + min(ticket.expiry - self.clock.time(), MAX_TICKET_LIFE_S)

    def _live(self) -> list[Attempt]:
        return [*self.prefills.live.values(), *self.decodes.live.values()]

    def _prefill(self, key: AttemptKey, mode: Literal["push", "pull"], deadline: float) -> PrefillAttempt:
        found = self.prefills.get(key)
        if found is not None:
            return found
        machine = PrefillHandoff(key, mode, list(self.geometries))
        return self.prefills.add(key, PrefillAttempt(machine, deadline))

    def _supersede(self, key: AttemptKey) -> bool:
        """End earlier attempts of the same transfer; True while one of them is not quiet."""
        earlier = [other for other in self.prefills.same_transfer(key) if other.attempt < key.attempt]
        for other in earlier:
            event = ev.Abort("superseded", "a later attempt of this transfer has begun")
            self.to_prefill(other, event)
        return any(other in self.prefills.live for other in earlier)

    # ------------------------------------------------------------ messages

    def on_message(self, connection: Connection, message: Message) -> None:
        """One message. What is not allowed is counted and dropped; it never raises `ProtocolError`."""
        try:
            if connection.identity is None:
                self._from_server(connection, message)
            else:
                self._from_client(connection, message)
        except ProtocolError as error:
            self.figures.count("rejected")
            log.warning("rejected a message: %s", error)

    def _from_server(self, connection: Connection, message: Message) -> None:
        link = self.links.servers.get(connection.address)
        if link is None or link.connection is not connection:
            return
        if isinstance(message, Hello):
            if link.hello is not None:
                return
            self.links.greet(link, message)
            for attempt in [*self.decodes.live.values(), *self.decodes.ended.values()]:
                if attempt.link is link:
                    self._join(attempt, message)
        elif isinstance(message, Bye):
            self._server_left(link, message)
        elif isinstance(message, AttemptMessage):
            known = self.decodes.get(message.key)
            if known is None or known.link is not link or not link.ready:
                raise ProtocolError("message for an attempt that is not open here")
            self._feed(known, ev.Received(message))

    def _join(self, attempt: DecodeAttempt, hello: Hello) -> None:
        """The link's HELLO is known: register, or fail with what it says."""
        link = attempt.link
        if link.refusal is not None:
            self._feed(attempt, ev.PeerLost(*link.refusal, fenced=False))
        elif hello.incarnation != attempt.machine.key.prefill_incarnation:
            text = f"another engine is at {link.connection.address} now: {hello.engine_id}"
            self._feed(attempt, ev.PeerLost("peer_lost", text, fenced=False))
        else:
            attempt.peer = attempt.peer or link.peer
            self._feed(attempt, ev.PeerReady())

    def _server_left(self, link: Link, bye: Bye) -> None:
        attempts = [attempt for attempt in self.decodes.live.values() if attempt.link is link]
        self.links.hang_up(link)
        if bye.reason == "unknown_session" and attempts:
            # It restarted, or forgot this session: its next HELLO tells which.
            fresh = self.links.dial(link.connection.address)
            for attempt in attempts:
                attempt.link = fresh
            return
        for attempt in attempts:
            text = f"the prefill engine left: {bye.reason}"
            self._feed(attempt, ev.PeerLost("peer_lost", text, bye.quiet))

    def _from_client(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Hello):
            moved = self.links.client_hello(connection, message)
            for attempt in self.prefills.live.values() if moved else ():
                if moved and attempt.link is moved[0]:
                    attempt.link = moved[1]
            return
        link = self.links.clients.get(connection)
        if link is None or link.hello is None:
            raise ProtocolError("a session begins with HELLO")
        if isinstance(message, Bye):
            self.links.hang_up(link)
            for attempt in list(self.prefills.live.values()):
                if attempt.link is link:
                    text = f"the decode engine left: {message.reason}"
                    self._feed(attempt, ev.PeerLost("peer_lost", text, message.quiet))
        elif isinstance(message, AttemptMessage):
            self._attempt_message(link, link.hello, message)

    def _attempt_message(self, link: Link, hello: Hello, message: AttemptMessage) -> None:
        key = message.key
        if key.decode_incarnation != hello.incarnation or key.prefill_incarnation != self.config.incarnation:
            raise ProtocolError("message for an attempt of other engines")
        if isinstance(message, Register):
            self._register(link, message)
            return
        attempt = self.prefills.get(key)
        if attempt is None:
            if not isinstance(message, Cancel):
                raise ProtocolError("message for an attempt that is not open here")
            # A tombstone: the REGISTER that may come after it must start nothing.
            attempt = self._prefill(key, "push", self.clock.monotonic() + MAX_TICKET_LIFE_S)
        attempt.link = link
        self._feed(attempt, ev.Received(message))

    def _register(self, link: Link, message: Register) -> None:
        key = message.key
        try:
            ticket = self.links.check_register(link, message)
            if any(other.attempt > key.attempt for other in self.prefills.same_transfer(key)):
                raise ProtocolError("a later attempt of this transfer has begun")
            if self._supersede(key):
                self._held.append((link, message))
                return
            attempt = self._prefill(key, ticket.mode, self._deadline(ticket))
            attempt.link = link
            self._feed(attempt, ev.Received(message), strict=True)
        except ProtocolError as error:
            self.figures.count("rejected")
            log.warning("refused REGISTER of %s: %s", key, error)
            reason = link.refusal[0] if link.refusal else "register_refused"
            self.channel.send(link.connection, Nack(key, reason, str(error)[:2000]))

    # ------------------------------------------------------------ machines

    def _feed(self, attempt: Attempt, event: ev.MachineEvent, strict: bool = False) -> None:
        """Give a machine an event and carry out what it asks for, in order. `strict` lets it refuse."""
        self._queue.append((attempt, event))
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                target, what = self._queue.popleft()
                try:
                    actions = target.machine.handle(what)
                except ProtocolError:
                    if strict and what is event:
                        raise
                    log.exception("an event was refused")
                    continue
                for action in actions:
                    self._carry_out(target, action)
                self.prefills.settle(target.machine.key)
                self.decodes.settle(target.machine.key)
        finally:
            self._running = False

    def _carry_out(self, attempt: Attempt, action: ev.Action) -> None:
        match action:
            case ev.Send(message):
                self._send(attempt, message)
            case ev.StartCopy():
                self._start_copy(attempt, action)
            case ev.CancelCopies(copy_ids):
                for end in self.operations.cancel(attempt, copy_ids):
                    self._feed(attempt, end)
            case ev.Notify(event):
                self.figures.note(event, attempt.machine.copies)
                try:
                    self.on_event(event)
                except Exception:
                    # The engine's fault; the other attempts must go on.
                    log.exception("the engine's handler failed on %r", event)

    def _send(self, attempt: Attempt, message: AttemptMessage) -> None:
        link = attempt.link
        if link is None or not link.ready:
            return  # repeated when there is a session again
        try:
            self.channel.send(link.connection, message)
        except ProtocolError as error:
            self._feed(attempt, ev.Abort("message_too_large", str(error)))

    def _start_copy(self, attempt: Attempt, copy: ev.StartCopy) -> None:
        link = attempt.link
        if link is None or link.peer is None or link.hello is None:
            gone = ev.CopyEnded(copy.copy_id, ok=False, message="the session with the peer is gone")
            self._feed(attempt, gone)
            return
        own, far = self.geometries[copy.group], link.hello.geometries[copy.group]
        push = isinstance(attempt, PrefillAttempt)
        tag = f"{attempt.machine.key} {copy.group} [{copy.start}, {copy.stop})"
        source, dest = (own, far) if push else (far, own)
        direction: Literal["write", "read"] = "write" if push else "read"
        end = self.operations.start(attempt, copy, link.peer, direction, source, dest, tag)
        if end is not None:
            self._feed(attempt, end)

    def poll_copies(self) -> None:
        """Hand ends of copies to their machines."""
        for owner, end in self.operations.ended():
            self._feed(owner, end)

    # ------------------------------------------------------------ time

    def on_time(self) -> float:
        """Do what is due; returns the seconds after which it must be called again."""
        now, timers = self.clock.monotonic(), self.config.timers
        if now >= self._next_check:
            self._next_check = now + timers.check
            self._check_peers()
            for attempt in self._live():
                if now >= attempt.deadline and not attempt.expired:
                    attempt.expired = True
                    self._feed(attempt, ev.Deadline())
            held, self._held = self._held, []
            for link, message in held:
                self._register(link, message)
        if now >= self._next_retry:
            self._next_retry = now + timers.retry
            for attempt in self._live():
                self._feed(attempt, ev.Tick())
            self.links.repeat_hello(now)
            # A REGISTER delayed past its ticket's end is refused by the ticket, so the tombstone may go.
            self.prefills.forget(now - timers.retry)
            self.decodes.forget(now - timers.retry)
        return timers.check if self._held or self._live() else timers.retry

    def _check_peers(self) -> None:
        """Notice peers that died, and quarantined pages whose last writer or reader is fenced."""
        for attempt in self._live():
            peer = attempt.peer
            if peer is not None and not peer.alive():
                fenced = peer.fenced()
                if fenced or not attempt.closing:
                    self._feed(attempt, ev.PeerLost("peer_lost", "the peer engine died", fenced))
        self.links.sweep([attempt.peer for attempt in self._live()])

    def stats(self) -> dict[str, Any]:
        """See `HandoffAgent.stats`. Any thread."""
        live = self._live()
        return {
            **self.figures.snapshot(),
            "outstanding": len(live),
            "quarantined": sum(attempt.closing for attempt in live),
            "sessions": self.links.num_ready,
            "malformed": self.channel.malformed,
        }

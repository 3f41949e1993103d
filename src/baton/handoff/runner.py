"""Runs the machines of one engine: routes messages and ends of copies to them, and carries out their actions.

All methods are for one thread; `agent.py` provides it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError, IncompatiblePeerError, ProtocolError
from baton.handoff import events as ev
from baton.handoff.attempts import Book, DecodeAttempt, Link, PrefillAttempt
from baton.handoff.channel import Channel, Connection
from baton.handoff.decode import DecodeHandoff, DecodePhase
from baton.handoff.fingerprint import compare, geometry_fields
from baton.handoff.messages import (
    AttemptKey,
    AttemptMessage,
    Bye,
    Cancel,
    Hello,
    Message,
    Nack,
    Register,
    check_table,
)
from baton.handoff.operations import Operations
from baton.handoff.planner import RankGeometry
from baton.handoff.prefill import PrefillHandoff, PrefillPhase
from baton.handoff.ticket import MAX_TICKET_LIFE_S, Ticket, mint, verify
from baton.transports.base import Peer, Transport

log = logging.getLogger(__name__)
Attempt = PrefillAttempt | DecodeAttempt


@dataclass(frozen=True, slots=True)
class Timers:
    """Durations in seconds. None of them frees memory: they repeat messages and end waits with an error."""

    retry: float = 1.0  # an unanswered message is repeated
    check: float = 0.1  # deadlines and the life of peers are looked at
    close: float = 5.0  # closing waits at most this long for copies to end


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Who this engine is on the control channel.

    `incarnation` differs for each process; `fingerprint` holds the fields that must be equal on both engines
    (model, drafter, tokenizer, ...), geometry is added to it; `ticket_key` is the router's.
    """

    engine_id: str
    incarnation: str
    bind: str = "tcp://127.0.0.1:*"
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    ticket_key: bytes = b""
    timers: Timers = field(default_factory=Timers)


class HandoffRunner:
    """The engine's half of all its handoffs. See the module's docstring."""

    def __init__(
        self,
        config: AgentConfig,
        geometries: Mapping[str, RankGeometry],
        transport: Transport,
        descriptor: bytes,
        channel: Channel,
        on_event: Callable[[ev.HandoffEvent], None],
    ) -> None:
        self.config = config
        self.geometries = dict(geometries)
        self.transport = transport
        self.channel = channel
        self.on_event = on_event
        self.operations: Operations[Attempt] = Operations(transport)
        self.prefills: Book[PrefillAttempt] = Book()
        self.decodes: Book[DecodeAttempt] = Book()
        self.clients: dict[Connection, Link] = {}  # engines that dialled us, to decode
        self.servers: dict[str, Link] = {}  # engines we dialled, by address, to decode from
        self._hello = Hello(
            config.engine_id, config.incarnation, dict(config.fingerprint), self.geometries, descriptor
        )
        self._fields = geometry_fields(self.geometries)
        self._queue: deque[tuple[Attempt, ev.MachineEvent]] = deque()
        self._running = False
        # An attempt whose predecessor of the same transfer is not quiet yet waits here with its REGISTER.
        self._held: list[tuple[Link, Register]] = []
        self._retired: list[Peer] = []
        self._next_check = self._next_retry = 0.0
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    # ------------------------------------------------------------ the engine's calls

    def open_prefill(self, ticket: Ticket) -> None:
        """The engine took P's leg."""
        attempt = self._prefill(ticket.key, ticket.mode, self._deadline(ticket))
        self._supersede(ticket.key)
        self._feed(attempt, ev.Opened())

    def open_decode(
        self, ticket: Ticket, wanted: dict[str, tuple[int, int]], pages: dict[str, list[int]]
    ) -> None:
        """The engine took D's leg and has destination pages."""
        if self.decodes.get(ticket.key) is not None:
            log.warning("attempt %s is open already", ticket.key)
            return
        link = self._server(ticket)
        machine = DecodeHandoff(ticket.key, ticket.mode, mint(self.config.ticket_key, ticket), wanted, pages)
        attempt = DecodeAttempt(machine, self._deadline(ticket), link)
        self.decodes.add(ticket.key, attempt)
        if link.hello is not None:
            self._join(attempt)

    def to_prefill(self, key: AttemptKey, event: ev.MachineEvent) -> None:
        """An event of the engine for P's half; none when it is unknown or over."""
        attempt = self.prefills.get(key)
        if attempt is not None:
            self._feed(attempt, event)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """The engine gives up on either half."""
        for attempt in (self.prefills.get(key), self.decodes.get(key)):
            if attempt is not None and not attempt.machine.closed:
                self._feed(attempt, ev.Abort(reason, "given up by the engine"))

    def _deadline(self, ticket: Ticket) -> float:
        return time.monotonic() + min(ticket.expiry - time.time(), MAX_TICKET_LIFE_S)

    def _prefill(self, key: AttemptKey, mode: Any, deadline: float) -> PrefillAttempt:
        found = self.prefills.get(key)
        if found is None:
            machine = PrefillHandoff(key, mode, list(self.geometries))
            found = self.prefills.add(key, PrefillAttempt(machine, deadline))
        return found

    def _supersede(self, key: AttemptKey) -> list[PrefillAttempt]:
        """End earlier attempts of the same transfer; those that are not quiet yet."""
        others = [
            attempt
            for other, attempt in self.prefills.entries.items()
            if other.transfer_id == key.transfer_id and other.attempt < key.attempt
        ]
        for attempt in others:
            if not attempt.machine.closed:
                self._feed(attempt, ev.Abort("superseded", "a later attempt of this transfer has begun"))
        return [attempt for attempt in others if not attempt.machine.closed]

    # ------------------------------------------------------------ sessions

    def _server(self, ticket: Ticket) -> Link:
        """The link to the P that a ticket names; dialled anew when the last one is of no use."""
        address = ticket.prefill_address
        link = self.servers.get(address)
        if link is not None and link.hello is not None:
            same = link.hello.incarnation == ticket.prefill_incarnation
            if link.refusal is not None or not same:
                self._hang_up(link)
                link = None
        if link is None:
            link = Link(self.channel.dial(address))
            self.servers[address] = link
            self._say_hello(link)
        return link

    def _say_hello(self, link: Link) -> None:
        link.next_hello = time.monotonic() + self.config.timers.retry
        self.channel.send(link.connection, self._hello)

    def _hang_up(self, link: Link) -> None:
        self.channel.drop(link.connection)
        self.servers.pop(link.connection.address, None)
        self.clients.pop(link.connection, None)
        if link.peer is not None:
            self._retired.append(link.peer)

    def _greet(self, link: Link, hello: Hello) -> None:
        """Take a peer's HELLO: compare, and connect the transport so that the first copy finds it warm."""
        link.hello = hello
        try:
            for rank in hello.geometries.values():
                rank.geometry.check()
            here = {**self.config.fingerprint, **self._fields}
            compare(here, {**hello.fingerprint, **geometry_fields(hello.geometries)})
            link.peer = self.transport.connect(hello.descriptor)
        except IncompatiblePeerError as error:
            link.refusal = ("incompatible_peer", str(error))
        except BatonError as error:
            link.refusal = ("unreachable_peer", str(error))
        if link.refusal is not None:
            log.warning("no handoff with engine %s: %s", hello.engine_id, link.refusal[1])

    def on_message(self, connection: Connection, message: Message) -> None:
        """One message. What is not allowed is counted and dropped; it never raises."""
        try:
            if connection.identity is None:
                self._from_server(connection, message)
            else:
                self._from_client(connection, message)
        except ProtocolError as error:
            self._count("rejected")
            log.warning("rejected a message: %s", error)

    def _from_server(self, connection: Connection, message: Message) -> None:
        link = self.servers.get(connection.address)
        if link is None or link.connection is not connection:
            return
        if isinstance(message, Hello):
            if link.hello is None:
                self._greet(link, message)
                for attempt in list(self.decodes.entries.values()):
                    if attempt.link is link:
                        self._join(attempt)
        elif isinstance(message, Bye):
            self._server_left(link, message)
        elif isinstance(message, AttemptMessage):
            known = self.decodes.get(message.key)
            if known is None or known.link is not link or not link.ready:
                raise ProtocolError("message for an attempt that is not open here")
            self._feed(known, ev.Received(message))

    def _server_left(self, link: Link, bye: Bye) -> None:
        attempts = [attempt for attempt in self.decodes.live() if attempt.link is link]
        self._hang_up(link)
        if bye.reason == "unknown_session" and attempts:
            # It restarted, or forgot this session: its next HELLO tells which.
            fresh = Link(self.channel.dial(link.connection.address))
            self.servers[link.connection.address] = fresh
            self._say_hello(fresh)
            for attempt in self.decodes.entries.values():
                if attempt.link is link:
                    attempt.link = fresh
            return
        for attempt in attempts:
            self._feed(attempt, ev.PeerLost("peer_lost", f"the prefill engine left: {bye.reason}", bye.quiet))

    def _join(self, attempt: DecodeAttempt) -> None:
        """The link's HELLO is known: register, or fail with what it says."""
        link, key = attempt.link, attempt.machine.key
        assert link.hello is not None
        if link.refusal is not None:
            self._feed(attempt, ev.PeerLost(*link.refusal, fenced=False))
        elif link.hello.incarnation != key.prefill_incarnation:
            text = f"{link.connection.address} is now {link.hello.engine_id}/{link.hello.incarnation}"
            self._feed(attempt, ev.PeerLost("peer_lost", text, fenced=False))
        else:
            attempt.peer = link.peer
            self._feed(attempt, ev.PeerReady())

    def _from_client(self, connection: Connection, message: Message) -> None:
        link = self.clients.get(connection)
        if isinstance(message, Hello):
            if link is None:
                self._new_client(connection, message)
            self.channel.send(connection, self._hello)
            return
        if link is None or link.hello is None:
            raise ProtocolError("a session begins with HELLO")
        if isinstance(message, Bye):
            self._hang_up(link)
            for attempt in list(self.prefills.live()):
                if attempt.link is link:
                    text = f"the decode engine left: {message.reason}"
                    self._feed(attempt, ev.PeerLost("peer_lost", text, message.quiet))
        elif isinstance(message, AttemptMessage):
            self._attempt_message(link, link.hello, message)

    def _new_client(self, connection: Connection, hello: Hello) -> None:
        link = Link(connection)
        self._greet(link, hello)
        for old in list(self.clients.values()):
            if old.hello is None or old.hello.incarnation != hello.incarnation:
                continue
            # The same process in a new session; the older one is dead.
            self._hang_up(old)
            for attempt in self.prefills.entries.values():
                if attempt.link is old:
                    attempt.link = link
        self.clients[connection] = link

    def _attempt_message(self, link: Link, hello: Hello, message: AttemptMessage) -> None:
        key = message.key
        if key.decode_incarnation != hello.incarnation or key.prefill_incarnation != self.config.incarnation:
            raise ProtocolError("message for an attempt of other engines")
        if isinstance(message, Register):
            self._register(link, hello, message)
            return
        attempt = self.prefills.get(key)
        if attempt is None:
            if not isinstance(message, Cancel):
                raise ProtocolError("message for an attempt that is not open here")
            # A tombstone: the REGISTER that may come after it must start nothing.
            attempt = self._prefill(key, "push", time.monotonic() + MAX_TICKET_LIFE_S)
        attempt.link = link
        self._feed(attempt, ev.Received(message))

    def _register(self, link: Link, hello: Hello, message: Register) -> None:
        key, config = message.key, self.config
        try:
            if link.refusal is not None:
                raise IncompatiblePeerError({"handoff": link.refusal})
            ticket = verify(config.ticket_key, message.ticket, time.time())
            if ticket.key != key:
                raise ProtocolError("the ticket is for another attempt")
            here = (ticket.prefill_engine, ticket.prefill_incarnation)
            there = (ticket.decode_engine, ticket.decode_incarnation)
            if here != (config.engine_id, config.incarnation):
                raise ProtocolError("the ticket names another prefill engine")
            if there != (hello.engine_id, hello.incarnation):
                raise ProtocolError("the ticket names another decode engine")
            if any(
                k.transfer_id == key.transfer_id and k.attempt > key.attempt for k in self.prefills.entries
            ):
                raise ProtocolError("a later attempt of this transfer has begun")
            for group, (start, stop) in message.wanted.items():
                rank = hello.geometries.get(group)
                if rank is None or start > stop:
                    raise ProtocolError(f"group {group!r} or its interval [{start}, {stop}) does not exist")
                if ticket.mode == "push":
                    size, count = rank.geometry.page_size, rank.geometry.num_pages
                    check_table(group, message.pages.get(group, []), start, stop, size, count)
            if self._supersede(key):
                self._held.append((link, message))
                return
            attempt = self._prefill(key, ticket.mode, self._deadline(ticket))
            if attempt.machine.mode != ticket.mode and not attempt.machine.closed:
                raise ProtocolError("the ticket's mode has changed")
            attempt.link = link
            self._feed(attempt, ev.Received(message), strict=True)
        except ProtocolError as error:
            self._count("rejected")
            log.warning("refused REGISTER of %s: %s", key, error)
            reason = link.refusal[0] if link.refusal else "register_refused"
            self.channel.send(link.connection, Nack(key, reason, str(error)[:2000]))

    # ------------------------------------------------------------ machines

    def _live(self) -> list[Attempt]:
        live: list[Attempt] = [*self.prefills.live()]
        live.extend(self.decodes.live())
        return live

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
                    log.exception("event refused")
                    continue
                for action in actions:
                    self._carry_out(target, action)
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
                self._notify(attempt, event)

    def _send(self, attempt: Attempt, message: AttemptMessage) -> None:
        link = attempt.link
        if link is None or not link.ready:
            return  # repeated when there is a session again
        try:
            self.channel.send(link.connection, message)
        except ProtocolError as error:
            if not isinstance(message, Cancel):
                self._feed(attempt, ev.Abort("message_too_large", str(error)))

    def _start_copy(self, attempt: Attempt, copy: ev.StartCopy) -> None:
        link = attempt.link
        assert link is not None
        if link.peer is None or link.hello is None:
            self._feed(
                attempt, ev.CopyEnded(copy.copy_id, ok=False, message="the session with the peer is gone")
            )
            return
        own, far = self.geometries[copy.group], link.hello.geometries[copy.group]
        push = isinstance(attempt, PrefillAttempt)
        end = self.operations.start(
            attempt,
            copy,
            link.peer,
            "write" if push else "read",
            own if push else far,
            far if push else own,
            f"{attempt.machine.key} {copy.group} [{copy.start}, {copy.stop})",
        )
        if end is not None:
            self._feed(attempt, end)

    def _notify(self, attempt: Attempt, event: ev.HandoffEvent) -> None:
        with self._lock:
            if isinstance(event, ev.DecodeCommitted):
                self._counts["handoffs"] += 1
                self._counts["bytes"] += event.num_bytes
                self._counts["runs"] += event.num_runs
            elif isinstance(event, ev.DecodeFailed):
                self._failures[event.reason] += 1
            elif isinstance(event, ev.DecodeFinished):
                self._counts["finished"] += 1
            elif isinstance(event, ev.PrefillReleased):
                if event.outcome == "committed":
                    copies = attempt.machine.copies
                    self._counts["handoffs"] += 1
                    self._counts["bytes"] += copies.num_bytes
                    self._counts["runs"] += copies.num_runs
                elif event.outcome == "finished":
                    self._counts["finished"] += 1
                else:
                    self._failures[event.outcome] += 1
        try:
            self.on_event(event)
        except Exception:
            # The engine's fault; the other attempts must go on.
            log.exception("the engine's handler failed on %r", event)

    # ------------------------------------------------------------ time

    def poll_copies(self) -> None:
        """Hand ends of copies to their machines."""
        for owner, end in self.operations.ended():
            self._feed(owner, end)

    def on_time(self) -> float:
        """Do what is due; seconds until it must be called again, at most."""
        now, timers = time.monotonic(), self.config.timers
        if now >= self._next_check:
            self._next_check = now + timers.check
            self._check_peers()
            for attempt in self._live():
                if now >= attempt.deadline and not attempt.expired:
                    attempt.expired = True
                    self._feed(attempt, ev.Deadline())
            held, self._held = self._held, []
            for link, message in held:
                if link.hello is not None:
                    self._register(link, link.hello, message)
        if now >= self._next_retry:
            self._next_retry = now + timers.retry
            for attempt in self._live():
                self._feed(attempt, ev.Tick())
            for link in list(self.servers.values()):
                if link.hello is None and now >= link.next_hello:
                    self._say_hello(link)
            # A REGISTER delayed past its ticket's end is refused by the ticket, so the tombstone may go.
            self.prefills.forget(now - timers.retry)
            self.decodes.forget(now - timers.retry)
        idle = not (self._held or self._retired or any(self.prefills.live()) or any(self.decodes.live()))
        return timers.retry if idle else timers.check

    def _check_peers(self) -> None:
        """Notice peers that died, and quarantined pages whose last writer or reader is fenced."""
        fenced = {}
        for attempt in self._live():
            peer = attempt.peer if isinstance(attempt, DecodeAttempt) else attempt.link and attempt.link.peer
            if peer is None or peer.alive():
                continue
            if id(peer) not in fenced:
                fenced[id(peer)] = peer.fenced()
            closing = attempt.machine.phase in (PrefillPhase.CLOSING, DecodePhase.CLOSING)
            if fenced[id(peer)] or not closing:
                self._feed(attempt, ev.PeerLost("peer_lost", "the peer engine died", fenced[id(peer)]))
        for link in list(self.clients.values()):
            if link.peer is not None and not link.peer.alive():
                self._hang_up(link)
        for link in list(self.servers.values()):
            if link.peer is not None and not link.peer.alive():
                self._hang_up(link)
        used = {id(a.peer) for a in self.decodes.live()}
        used |= {id(a.link.peer) for a in self.prefills.live() if a.link is not None}
        for peer in [peer for peer in self._retired if id(peer) not in used]:
            self._retired.remove(peer)
            self.transport.disconnect(peer)

    # ------------------------------------------------------------ figures and the end

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def stats(self) -> dict[str, Any]:
        """Figures since the start, from any thread. See `HandoffAgent.stats`."""
        with self._lock:
            counts, failures = Counter(self._counts), dict(self._failures)
        live = self._live()
        closing = [a for a in live if a.machine.phase in (PrefillPhase.CLOSING, DecodePhase.CLOSING)]
        return {
            "handoffs": counts["handoffs"],
            "finished": counts["finished"],
            "bytes": counts["bytes"],
            "runs": counts["runs"],
            "runs_per_handoff": counts["runs"] / counts["handoffs"] if counts["handoffs"] else 0.0,
            "failures": failures,
            "outstanding": len(live),
            "quarantined": len(closing),
            "rejected": counts["rejected"],
            "malformed": self.channel.malformed,
        }

    def abort_all(self, reason: str) -> None:
        """Give up on every live attempt."""
        for attempt in self._live():
            self._feed(attempt, ev.Abort(reason, "the engine is closing"))

    def say_bye(self, reason: str) -> None:
        """End all sessions; peers learn whether our copies have ended."""
        bye = Bye(reason, quiet=len(self.operations) == 0)
        for link in [*self.clients.values(), *self.servers.values()]:
            self.channel.send(link.connection, bye)

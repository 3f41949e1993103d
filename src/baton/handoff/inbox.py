"""What peers say: finds the session and the attempt of each message, and refuses what is not allowed.

For one thread. An engine we dialled is a server (it prefills for us), one that dialled us a client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from baton.errors import ProtocolError
from baton.handoff import events as ev
from baton.handoff.attempts import DecodeAttempt, PrefillAttempt
from baton.handoff.config import AgentConfig
from baton.handoff.environment import Clock, Connection, ControlChannel
from baton.handoff.links import Link, Links
from baton.handoff.log_limit import LogLimit
from baton.handoff.machines import Machines
from baton.handoff.messages import (
    Announce,
    AttemptKey,
    AttemptMessage,
    Bye,
    Cancel,
    Cancelled,
    Hello,
    Message,
    Nack,
    ReadDone,
    Ready,
    Register,
    Renew,
    Repair,
    kind_of,
)
from baton.handoff.phases import DecodePhase
from baton.handoff.planner import RankGeometry
from baton.handoff.prefill import PrefillHandoff
from baton.handoff.ticket import MAX_TICKET_LIFE_S, Ticket, TicketRole

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

MAX_CANCELLED = 4096
Claim = Announce | Register


class Inbox:
    """Routes messages to attempts, and losses of sessions to those that used them."""

    def __init__(
        self,
        config: AgentConfig,
        geometries: Mapping[str, RankGeometry],
        channel: ControlChannel,
        links: Links,
        machines: Machines,
        clock: Clock,
    ) -> None:
        self._config = config
        self._geometries = geometries
        self._channel = channel
        self._links = links
        self._machines = machines
        self._clock = clock
        # A claim whose transfer has an earlier attempt that is not quiet yet waits here.
        self._held: dict[AttemptKey, tuple[Link, Claim]] = {}
        # Attempts that D cancelled before P's engine or a REGISTER came for them, and why. Their keys have no ticket.
        self._cancelled: dict[AttemptKey, str] = {}

    @property
    def holding(self) -> bool:
        """True while an ANNOUNCE or REGISTER waits for an earlier attempt to become quiet."""
        return bool(self._held)

    def on_message(self, connection: Connection, message: Message) -> None:
        """One message. What is not allowed is counted and dropped; it never raises `ProtocolError`."""
        try:
            if connection.identity is None:
                self._from_server(connection, message)
            else:
                self._from_client(connection, message)
        except ProtocolError as error:
            self._machines.figures.count("rejected")
            log.warning("rejected a message: %s", error)

    # ------------------------------------------------------------ D's side

    def _from_server(self, connection: Connection, message: Message) -> None:
        link = self._links.servers.get(connection.address)
        if link is None or link.connection is not connection:
            return
        link.heard = self._clock.monotonic()
        if isinstance(message, Hello):
            if link.hello is None:
                self._greeted(link, message)
        elif isinstance(message, Bye):
            self._server_left(link, message)
        elif isinstance(message, Renew):
            self._links.renewed(link, message)
            if message.stalled:
                self._machines.stalled(link)
        elif isinstance(message, AttemptMessage):
            self._answered(link, message)

    def _greeted(self, link: Link, message: Hello) -> None:
        try:
            opened = self._links.server_hello(link, message)
        except ProtocolError as error:
            for attempt in self._decodes_at(link.connection.address):
                self._machines.lose(attempt, "unreachable_peer", str(error))
            raise
        if opened:
            for attempt in self._decodes_at(link.connection.address):
                self.join(attempt, link, message)

    def _answered(self, link: Link, message: AttemptMessage) -> None:
        key, hello = message.key, link.hello
        if hello is None or not link.ready:
            raise ProtocolError("a session begins with HELLO")
        if (key.prefill_incarnation, key.decode_incarnation) != (hello.incarnation, self._config.incarnation):
            raise ProtocolError("message for an attempt of other engines")
        known = self._machines.decodes.get(key)
        if known is not None:
            if isinstance(message, Ready):
                known.asked(link)
            self._machines.feed(known, ev.Received(message))
        elif isinstance(message, Cancel):
            # Only what is over is forgotten, so no read of it is left; P may still hold its pages for it.
            self._channel.send(link.connection, Cancelled(key, message.reason))
        else:
            raise ProtocolError("message for an attempt that is not open here")

    def _decodes_at(self, address: str) -> list[DecodeAttempt]:
        """Attempts with that engine, ended ones too: P may still wait to hear of them."""
        book = self._machines.decodes
        return [attempt for attempt in [*book.live.values(), *book.ended.values()] if attempt.address == address]

    def dial(self, attempt: DecodeAttempt, ticket: Ticket) -> None:
        """Bring a new attempt to the session with the P that its ticket names."""
        try:
            link = self._links.server(ticket)
        except ProtocolError as error:
            self._machines.lose(attempt, "unreachable_peer", str(error))
            return
        if link.hello is not None:
            self.join(attempt, link, link.hello)

    def _dial_again(self, lost: Link) -> None:
        """A session is gone: begin another where there may be something left to say or to hear."""
        address = lost.connection.address
        if not self._links.may_return(lost) and not self._decodes_at(address):
            return
        try:
            self._links.dial(address, lost)
        except ProtocolError as error:
            for attempt in self._decodes_at(address):
                self._machines.lose(attempt, "unreachable_peer", str(error))

    def join(self, attempt: DecodeAttempt, link: Link, hello: Hello) -> None:
        """P's HELLO is known: register, or fail with what it says."""
        machines = self._machines
        if link.refusal is not None:
            machines.lose(attempt, *link.refusal)
        elif hello.incarnation != attempt.machine.key.prefill_incarnation:
            machines.lose(attempt, "peer_lost", f"another engine is at {attempt.address} now: {hello.engine_id}")
        else:
            unhealthy = self._links.unhealthy(hello.incarnation)
            if unhealthy and attempt.machine.phase is DecodePhase.WAITING:
                machines.lose(attempt, "unhealthy_peer", unhealthy)
            attempt.meet(link)
            machines.feed(attempt, ev.PeerReady())

    def _server_left(self, link: Link, bye: Bye) -> None:
        address = link.connection.address
        self._links.hang_up(link)
        if bye.reason == "unknown_session":
            # It restarted, or forgot this session: its next HELLO tells which.
            self._dial_again(link)
            return
        for attempt in self._decodes_at(address):
            # Its word counts for its own copies, not for those of a process that was there before.
            own = link.hello is not None and link.hello.incarnation == attempt.machine.key.prefill_incarnation
            self._machines.lose(attempt, "peer_lost", f"the prefill engine left: {bye.reason}", bye.quiet and own)

    # ------------------------------------------------------------ P's side

    def prefill(self, key: AttemptKey, mode: Literal["push", "pull"], expiry: float) -> PrefillAttempt:
        """P's half of an attempt, made where it is not known yet."""
        found = self._machines.prefills.get(key)
        if found is not None:
            return found
        config = self._config
        machine = PrefillHandoff(key, mode, list(self._geometries), config.max_retries, config.integrity)
        attempt = self._machines.prefills.add(key, PrefillAttempt(expiry, machine=machine))
        reason = self._cancelled.pop(key, None)
        if reason is not None:
            self._machines.feed(attempt, ev.Received(Cancel(key, reason)))
        return attempt

    def expiry(self, ticket: Ticket, role: TicketRole) -> float:
        """When a ticket expires, in monotonic seconds."""
        return min(ticket.expiry(role), self._clock.monotonic() + MAX_TICKET_LIFE_S)

    def supersede(self, key: AttemptKey) -> bool:
        """End earlier attempts of the same transfer; True while one of them is not quiet."""
        prefills = self._machines.prefills
        earlier = [other for other in prefills.same_transfer(key) if other.attempt < key.attempt]
        for other in earlier:
            if attempt := prefills.get(other):
                self._machines.feed(attempt, ev.Abort("superseded", "a later attempt of this transfer has begun"))
        return any(other in prefills.live for other in earlier)

    def _from_client(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Hello):
            link = self._links.client_hello(connection, message)
            for attempt in self._machines.prefills.live.values():
                # The same process in a new session: what it is still owed goes there.
                if attempt.link is not None and attempt.link.is_same(link):
                    attempt.link = link
                    attempt.meet(link)
            return
        known = self._links.clients.get(connection)
        if known is None or known.hello is None:
            if known is not None:
                # A stranger; or this side has lost the session of a peer, which then begins another.
                self._channel.send(connection, Bye("unknown_session"))
                self._links.hang_up(known)
            raise ProtocolError("a session begins with HELLO, and a proof that the ticket key is known")
        known.heard = self._clock.monotonic()
        if isinstance(message, Bye):
            self._links.hang_up(known)
            self._client_lost(known, "peer_lost", f"the decode engine left: {message.reason}", message.quiet)
        elif isinstance(message, Renew):
            self._links.renewed(known, message)
            if message.stalled:
                self._machines.stalled(known)
        elif isinstance(message, AttemptMessage):
            self._attempt_message(known, known.hello, message)

    def _client_lost(self, link: Link, reason: str, text: str, quiet: bool = False) -> None:
        for attempt in list(self._machines.prefills.live.values()):
            if attempt.link is link:
                self._machines.lose(attempt, reason, text, quiet)

    def _attempt_message(self, link: Link, hello: Hello, message: AttemptMessage) -> None:
        key = message.key
        if key.decode_incarnation != hello.incarnation or key.prefill_incarnation != self._config.incarnation:
            raise ProtocolError("message for an attempt of other engines")
        if isinstance(message, Announce | Register):
            self._claimed(link, message)
            return
        attempt = self._machines.prefills.get(key)
        if attempt is None:
            if not isinstance(message, Cancel | ReadDone | Repair):
                raise ProtocolError("message for an attempt that is not open here")
            if not isinstance(message, Cancel):
                # It had begun once, and only what is over is forgotten, with its ticket expired.
                self._channel.send(link.connection, Cancelled(key, "forgotten"))
                return
            # The REGISTER that may come after it must start nothing.
            self._cancelled[key] = message.reason
            if len(self._cancelled) > MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]
            self._channel.send(link.connection, Cancelled(key, message.reason))
            return
        if not attempt.may_hear(link):
            raise ProtocolError("message for an attempt of other engines")
        attempt.link = link
        (attempt.asked if isinstance(message, Repair) else attempt.meet)(link)
        self._machines.feed(attempt, ev.Received(message))

    def _claimed(self, link: Link, message: Claim) -> None:
        """D lays claim to an attempt, by ANNOUNCE or REGISTER."""
        key = message.key
        known = self._machines.prefills.get(key)
        try:
            if known is not None and known.served(link) and known.may_hear(link):
                # Its ticket was good when it came first, and may have expired since.
                if isinstance(message, Register) and not known.machine.registered:
                    self._links.check_tables(link, message, known.machine.mode)
                self._take(known, link, message)
                return
            ticket = self._links.check_register(link, message)
            if any(other.attempt > key.attempt for other in self._machines.prefills.same_transfer(key)):
                raise ProtocolError("a later attempt of this transfer has begun")
            if self.supersede(key):
                self._held[key] = link, message
                return
            self._take(self.prefill(key, ticket.mode, self.expiry(ticket, "prefill")), link, message)
        except ProtocolError as error:
            self._machines.figures.count("rejected")
            log.warning("refused %s of %s: %s", kind_of(message), key, error)
            reason = link.refusal[0] if link.refusal else "register_refused"
            self._channel.send(link.connection, Nack(key, reason, str(error)[:2000]))

    def _take(self, attempt: PrefillAttempt, link: Link, message: Claim) -> None:
        attempt.link = link
        attempt.heard(self._clock.monotonic())
        (attempt.asked if isinstance(message, Register) else attempt.meet)(link)
        self._machines.feed(attempt, ev.Received(message), strict=True)

    def retry_held(self) -> None:
        """Try again the claims that wait for an earlier attempt."""
        held, self._held = self._held, {}
        for link, message in held.values():
            self._claimed(link, message)

    # ------------------------------------------------------------ silence and death

    def drop_dead(self) -> None:
        """Drop sessions whose transport's end is dead."""
        for link in self._links.dead():
            self._links.hang_up(link)
            if link.connection.identity is None:
                # Only the connection may have died: the process then waits for a word in a new session.
                self._dial_again(link)

    def evict(self, now: float) -> None:
        """Give up on peers whose lease has ended; `now` in monotonic seconds."""
        for link in self._links.expired(now):
            address = link.connection.address
            if link.hello is None:
                for attempt in self._decodes_at(address):
                    self._machines.lose(attempt, "unreachable_peer", f"no answer from {address}")
                # Its pages may wait to become quiet, or P's for a word from here: keep asking.
                if self._links.may_return(link) or self._decodes_at(address):
                    link.heard = now
                else:
                    self._links.hang_up(link)
                continue
            self._machines.figures.count("lost_leases")
            text = f"engine {link.hello.engine_id} was silent for {link.lease:g} s"
            log.warning("%s: evicted", text)
            self._links.hang_up(link)
            if link.connection.identity is not None:
                self._client_lost(link, "lease_expired", text)
                continue
            for attempt in self._decodes_at(address):
                self._machines.lose(attempt, "lease_expired", text)
            self._dial_again(link)

"""What peers say: finds the session and the attempt of each message, and refuses what is not allowed.

For one thread. An engine we dialled is a server (it prefills for us), one that dialled us a client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from baton.errors import ProtocolError
from baton.handoff.channel.base import Clock, Connection, ControlChannel
from baton.handoff.channel.config import AgentConfig
from baton.handoff.channel.sessions import Link, Links
from baton.handoff.node.attempts import DecodeAttempt
from baton.handoff.node.claims import Claims
from baton.handoff.node.execution import Machines
from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import (
    Announce,
    AttemptMessage,
    Bye,
    Cancel,
    Cancelled,
    Hello,
    Message,
    ReadDone,
    Ready,
    Register,
    Renew,
    Repair,
)
from baton.handoff.protocol.phases import DecodePhase
from baton.handoff.protocol.ticket import Ticket
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())


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
        self._channel = channel
        self._links = links
        self._machines = machines
        self._clock = clock
        self.claims = Claims(config, geometries, channel, links, machines, clock)

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
        if isinstance(message, Hello) and link.hello is not None:
            return  # unlike all else, anybody at the address can say it: no sign of life
        link.heard = self._clock.monotonic()
        if isinstance(message, Hello):
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
        if hello is None or not (link.talking or isinstance(message, Cancel | Cancelled)):
            raise ProtocolError("a session begins with HELLO")
        if (key.prefill_incarnation, key.decode_incarnation) != (hello.incarnation, self._config.incarnation):
            raise ProtocolError("message for an attempt of other engines")
        known = self._machines.decodes.get(key)
        if known is not None:
            if isinstance(message, Ready):
                if link.connecting is not None:
                    return  # copies need the connection; P repeats what it said
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
        """P's HELLO is known, and so is what became of the connection: register, or fail with what they say."""
        if link.connecting is not None:
            return
        machines = self._machines
        if link.refusal is not None:
            machines.lose(attempt, *link.refusal)
        elif hello.incarnation != attempt.machine.key.prefill_incarnation:
            machines.lose(attempt, "peer_lost", f"another engine is at {attempt.address} now: {hello.engine_id}")
        else:
            unhealthy = self._links.health.why_not(hello.incarnation)
            if unhealthy and attempt.machine.phase is DecodePhase.WAITING:
                machines.lose(attempt, "unhealthy_peer", unhealthy)
            attempt.meet(link)
            machines.feed(attempt, ev.PeerReady())

    def connected(self, link: Link) -> None:
        """The transport's end of a link is there, or cannot be had."""
        if link.connection.identity is None and link.hello is not None:
            for decode in self._decodes_at(link.connection.address):
                self.join(decode, link, link.hello)
        elif link.connection.identity is not None:
            for prefill in self._machines.prefills.live.values():
                if prefill.link is link:
                    prefill.meet(link)
            self.claims.retry()

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
            self.claims.take(link, message)
            return
        attempt = self._machines.prefills.get(key)
        if attempt is None:
            if not isinstance(message, Cancel | ReadDone | Repair):
                raise ProtocolError("message for an attempt that is not open here")
            if not isinstance(message, Cancel):
                # It had begun once, and only what is over is forgotten, with its ticket expired.
                self._channel.send(link.connection, Cancelled(key, "forgotten"))
                return
            self.claims.cancel(key, message.reason)
            self._channel.send(link.connection, Cancelled(key, message.reason))
            return
        if not attempt.may_hear(link):
            raise ProtocolError("message for an attempt of other engines")
        attempt.link = link
        if isinstance(message, Repair) and link.connecting is not None:
            return  # copies need the connection; D repeats what it said
        (attempt.asked if isinstance(message, Repair) else attempt.meet)(link)
        self._machines.feed(attempt, ev.Received(message))

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

"""Peer engines: who they are, whether KV may be exchanged with them, and the session with each.

A link is opened by HELLO, in which each side proves that it knows the ticket key: whoever does not is a stranger, gets
no descriptor of the transport, and moves or ends no session. Then fingerprints are compared field by field and the
transport begins to connect, so that the first copy finds it warm and an unfit peer is refused before any request.
Connecting goes on beside everything else; attempts use the link when it has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from baton.errors import BatonError, IncompatiblePeerError, ProtocolError
from baton.handoff.channel.base import Clock, Connection, ControlChannel
from baton.handoff.channel.config import AgentConfig
from baton.handoff.channel.connecting import Connector
from baton.handoff.channel.health import Health
from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol.fingerprint import compare, geometry_fields
from baton.handoff.protocol.greeting import Side, is_proven, prove, session_key
from baton.handoff.protocol.messages import CHALLENGE_BYTES, Announce, Bye, Hello, Register, Renew, check_table
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, Ticket, verify
from baton.log_limit import LogLimit
from baton.transports.base import Peer, Transport
from baton.wire import Mode

log = logging.getLogger(__name__)
log.addFilter(LogLimit())


@dataclass(slots=True, eq=False)
class Link:
    """One peer engine: the session with it, what it said in HELLO, and the transport's end.

    `hello` is what it said once it had proven itself, `connecting` is set while the transport's end is under way,
    `peer` once it is there. `refusal` is `(reason, message)` when no KV may be exchanged all the same. `challenge` is
    the one that it was last shown a proof by. The peer is held for alive for `lease` seconds after it was `heard` last
    (monotonic seconds). `until` then the process of the session before may still wait for a word about attempts of
    that time. `round_trip` is measured, in seconds.
    """

    connection: Connection
    hello: Hello | None = None
    connecting: Future[Peer] | None = None
    peer: Peer | None = None
    refusal: tuple[str, str] | None = None
    challenge: bytes = b""
    next_hello: float = 0.0
    until: float = 0.0
    heard: float = 0.0
    lease: float = 0.0
    round_trip: float | None = None
    nonce: int = 0
    asked: float = 0.0

    @property
    def ready(self) -> bool:
        """True when attempts may use it."""
        return self.talking and self.connecting is None

    @property
    def talking(self) -> bool:
        """True when the peer is one with which KV may be exchanged, be it connected or not."""
        return self.hello is not None and self.refusal is None

    def is_same(self, other: Link) -> bool:
        """True when both lead to the same process, by the same key."""
        mine, theirs = self.hello, other.hello
        if mine is None or theirs is None or self.connection.engine != other.connection.engine:
            return False
        return (mine.engine_id, mine.incarnation) == (theirs.engine_id, theirs.incarnation)


class Links:
    """All links of one engine. For one thread."""

    def __init__(
        self,
        config: AgentConfig,
        geometries: Mapping[str, RankGeometry],
        transport: Transport,
        descriptor: bytes,
        channel: ControlChannel,
        clock: Clock,
    ) -> None:
        self.clients: dict[Connection, Link] = {}  # engines that dialled us, to decode
        self.servers: dict[str, Link] = {}  # engines we dialled, by address, to decode from
        self.is_stalled: Callable[[], bool] = lambda: False  # whether the engine behind the agent hangs
        self._config = config
        self._connector = Connector(transport, clock, channel.wake)
        self._channel = channel
        self._clock = clock
        facts = {**config.fingerprint, "handoff.integrity": config.integrity}
        self._hello = Hello(config.engine_id, config.incarnation, facts, dict(geometries), bytes(CHALLENGE_BYTES))
        self._descriptor = descriptor
        self._fields = {**facts, **geometry_fields(geometries)}
        self.health = Health()

    @property
    def num_ready(self) -> int:
        """Peers with which KV can be exchanged now. Any thread."""
        return sum(link.ready for link in self._all())

    # ------------------------------------------------------------ D's side: engines we dialled

    def server(self, ticket: Ticket) -> Link:
        """The link to the P that a ticket names; dialled anew when the last one is of no use.

        Raises `ProtocolError` for an address that cannot be dialled.
        """
        link = self.servers.get(ticket.prefill_address)
        if link is not None and link.hello is not None:
            same = link.hello.incarnation == ticket.prefill_incarnation
            if link.refusal is not None or not same:
                self.hang_up(link)
                link = None
        return link if link is not None else self.dial(ticket.prefill_address)

    def dial(self, address: str, lost: Link | None = None) -> Link:
        """A new link, whose HELLO is on its way; `lost` is the one whose place it takes."""
        link = self.servers[address] = self._link(self._channel.dial(address))
        if lost is not None:
            link.until = self._clock.monotonic() + MAX_TICKET_LIFE_S if lost.peer is not None else lost.until
        self._say_hello(link)
        return link

    def _link(self, connection: Connection) -> Link:
        return Link(connection, heard=self._clock.monotonic(), lease=self._config.timers.lease)

    def _say_hello(self, link: Link) -> None:
        link.next_hello = self._clock.monotonic() + self._config.timers.retry
        known = bool(link.challenge)
        hello = self._own_hello(link.connection, with_descriptor=known)
        if known:
            hello = prove(self._config.ticket_key, "dialled", link.connection.address, link.challenge, hello)
        self._channel.send(link.connection, hello)

    def _own_hello(self, connection: Connection, with_descriptor: bool) -> Hello:
        descriptor = self._descriptor if with_descriptor else None
        return msgspec.structs.replace(self._hello, challenge=connection.challenge, descriptor=descriptor)

    def _is_proven(self, side: Side, address: str, connection: Connection, hello: Hello) -> bool:
        return is_proven(self._config.ticket_key, side, address, connection.challenge, hello)

    def repeat_hello(self, now: float) -> None:
        """Repeat what was not answered; `now` in monotonic seconds."""
        for link in self.servers.values():
            if link.hello is None and now >= link.next_hello:
                self._say_hello(link)

    def server_hello(self, link: Link, hello: Hello) -> bool:
        """Take an answer to HELLO; True when the session is open by it, or refused.

        Raises `ProtocolError` when whoever answers at the address does not know the ticket key.
        """
        address = link.connection.address
        if not self._is_proven("answered", address, link.connection, hello):
            raise ProtocolError(f"who answers at {address} does not prove that it knows the ticket key")
        if hello.descriptor is None:
            # The same challenge again waits for the repetition, lest two that differ answer each other for ever.
            if hello.challenge != link.challenge:
                link.challenge = hello.challenge
                self._say_hello(link)
            return False
        link.connection.key = session_key(self._config.ticket_key, link.connection.challenge, hello.challenge)
        self._greet(link, hello)
        return True

    def _greet(self, link: Link, hello: Hello) -> None:
        """A peer that has proven itself: compare, and connect the transport."""
        link.hello = hello
        try:
            for rank in hello.geometries.values():
                rank.geometry.check()
            compare(self._fields, {**hello.fingerprint, **geometry_fields(hello.geometries)})
            self._connect(link, hello)
        except IncompatiblePeerError as error:
            link.refusal = ("incompatible_peer", str(error))
        except BatonError as error:
            link.refusal = ("unreachable_peer", str(error))
        if link.refusal is not None:
            log.warning("no handoff with engine %s: %s", hello.engine_id, link.refusal[1])

    def _connect(self, link: Link, hello: Hello) -> None:
        link.connecting = self._connector.begin(hello.descriptor or b"")
        if link.connecting.done():
            self._connected(link, link.connecting, hello)

    def _connected(self, link: Link, future: Future[Peer], hello: Hello) -> None:
        link.connecting = None
        try:
            link.peer = self._connector.result(future, hello.descriptor or b"")
        except BatonError as error:
            link.refusal = ("unreachable_peer", str(error))

    def reach_again(self, link: Link) -> None:
        """A peer that could not be reached speaks of an attempt: try again, where it is time to."""
        if link.hello is not None and link.refusal is not None and link.refusal[0] == "unreachable_peer":
            link.refusal = None
            self._connect(link, link.hello)

    def poll(self) -> list[Link]:
        """The links whose connection has ended since the last call, well or not."""
        self._connector.poll()
        ended = []
        for link in self._all():
            if link.hello is not None and link.connecting is not None and link.connecting.done():
                self._connected(link, link.connecting, link.hello)
                if link.refusal is not None:
                    log.warning("no handoff with engine %s: %s", link.hello.engine_id, link.refusal[1])
                ended.append(link)
        return ended

    # ------------------------------------------------------------ P's side: engines that dialled us

    def client_hello(self, connection: Connection, hello: Hello) -> Link:
        """Answer a HELLO, and return its link, which is open once the peer has proven itself.

        Raises `ProtocolError` for a proof that does not hold.
        """
        link = self.clients.setdefault(connection, self._link(connection))
        proven = self._is_proven("dialled", self._channel.address, connection, hello)
        if proven and link.hello is None:
            connection.proven = True
            connection.key = session_key(self._config.ticket_key, hello.challenge, connection.challenge)
            link.hello = hello
            for old in [old for old in self.clients.values() if old is not link and old.is_same(link)]:
                # Its attempts go on in the new session. The old connection of the transport may be broken at the other
                # end already, so there is a new one too.
                self.hang_up(old)
            self._greet(link, hello)
        own = self._own_hello(connection, with_descriptor=proven)
        answer = prove(self._config.ticket_key, "answered", self._channel.address, hello.challenge, own)
        self._channel.send(connection, answer)
        if hello.proof and not proven:
            raise ProtocolError(f"HELLO of {hello.engine_id!r} proves no knowledge of the ticket key")
        return link

    def check_register(self, link: Link, message: Announce | Register) -> Ticket:
        """The ticket of a claim that this link's peer may make, else `ProtocolError` that says why not."""
        config, hello = self._config, link.hello
        if hello is None or link.refusal is not None:
            raise ProtocolError(link.refusal[1] if link.refusal else "a session begins with HELLO")
        ticket = verify(config.ticket_key, message.ticket, "prefill", self._clock.monotonic())
        if ticket.key != message.key:
            raise ProtocolError("the ticket is for another attempt")
        if (ticket.prefill_engine, ticket.prefill_incarnation) != (config.engine_id, config.incarnation):
            raise ProtocolError("the ticket names another prefill engine")
        if (ticket.decode_engine, ticket.decode_incarnation) != (hello.engine_id, hello.incarnation):
            raise ProtocolError("the ticket names another decode engine")
        if isinstance(message, Register):
            self.check_tables(link, message, ticket.mode)
        return ticket

    def check_tables(self, link: Link, message: Register, mode: Mode) -> None:
        """Raise `ProtocolError` unless what a REGISTER names lies inside its sender's geometry."""
        geometries = link.hello.geometries if link.hello is not None else {}
        for group, (start, stop) in message.wanted.items():
            rank = geometries.get(group)
            if rank is None or start > stop:
                raise ProtocolError(f"group {group!r} or its interval [{start}, {stop}) does not exist")
            if mode == "push":
                size, count = rank.geometry.page_size, rank.geometry.num_pages
                check_table(group, message.pages.get(group, []), start, stop, size, count)

    # ------------------------------------------------------------ life and health

    def _all(self) -> list[Link]:
        return [*self.clients.values(), *self.servers.values()]

    def renew(self, now: float) -> None:
        """Say on each session, when it is due, that this engine lives; `now` in monotonic seconds."""
        timers = self._config.timers
        for link in self._all():
            if link.talking and now >= link.asked + timers.renew:
                link.nonce, link.asked = link.nonce + 1, now
                self._channel.send(link.connection, Renew(timers.lease, link.nonce, stalled=self.is_stalled()))

    def renewed(self, link: Link, message: Renew) -> None:
        """Take a RENEW: answer it, or learn the round trip from its echo."""
        link.lease = message.lease
        if not message.echo:
            stalled = self.is_stalled()
            echo = Renew(self._config.timers.lease, message.nonce, echo=True, stalled=stalled)
            self._channel.send(link.connection, echo)
        elif message.nonce == link.nonce:
            sample = self._clock.monotonic() - link.asked
            link.round_trip = sample if link.round_trip is None else (3 * link.round_trip + sample) / 4

    def may_return(self, link: Link) -> bool:
        """True where a process that was talked to may still live, and wait for a word about attempts of that time.

        A fence is no sign of its death: it says that one connection is closed, here, and P may wait for the other end
        of it. No attempt outlives `MAX_TICKET_LIFE_S`, unless its engine was paused that long.
        """
        return link.peer is not None or self._clock.monotonic() < link.until

    def forgive(self, now: float) -> None:
        """This process was paused, so that it cannot tell who was silent: all leases begin anew."""
        for link in self._all():
            link.heard = now

    def expired(self, now: float) -> list[Link]:
        """Links whose peer was silent for its lease."""
        return [link for link in self._all() if now - link.heard > link.lease]

    # ------------------------------------------------------------ ends

    def hang_up(self, link: Link) -> None:
        """Forget a link. Its transport end stays until no attempt needs it."""
        self._channel.drop(link.connection)
        self.clients.pop(link.connection, None)
        if self.servers.get(link.connection.address) is link:
            del self.servers[link.connection.address]
        if link.connecting is not None:
            self._connector.abandon(link.connecting)
            link.connecting = None
        if link.peer is not None:
            self._connector.retire(link.peer)

    def dead(self) -> list[Link]:
        """Links whose transport's end is dead."""
        return [link for link in self._all() if link.peer is not None and not link.peer.alive()]

    def sweep(self, used: list[Peer]) -> None:
        """See `Connector.sweep`."""
        self._connector.sweep(used)

    def say_bye(self, reason: str, quiet: bool) -> None:
        """End all sessions; `quiet` tells the peers that our copies have ended."""
        for link in self._all():
            self._channel.send(link.connection, Bye(reason, quiet))

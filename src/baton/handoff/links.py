"""Peer engines: who they are, whether KV may be exchanged with them, and the session with each.

A link is opened by HELLO: fingerprints are compared field by field and the transport is connected there, so
that the first copy finds it warm and an unfit peer is refused before any request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.errors import BatonError, IncompatiblePeerError, ProtocolError
from baton.handoff.environment import Clock, Connection, ControlChannel
from baton.handoff.fingerprint import compare, geometry_fields
from baton.handoff.messages import Bye, Hello, Register, check_table
from baton.handoff.planner import RankGeometry
from baton.handoff.ticket import Ticket, verify
from baton.transports.base import Peer, Transport

log = logging.getLogger(__name__)


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


@dataclass(slots=True, eq=False)
class Link:
    """One peer engine: the session with it, what it said in HELLO, and the transport's end.

    `refusal` is `(reason, message)` when its HELLO came but no KV may be exchanged with it.
    """

    connection: Connection
    hello: Hello | None = None
    peer: Peer | None = None
    refusal: tuple[str, str] | None = None
    next_hello: float = 0.0

    @property
    def ready(self) -> bool:
        """True when attempts may use it."""
        return self.hello is not None and self.refusal is None


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
        self._config = config
        self._transport = transport
        self._channel = channel
        self._clock = clock
        self._hello = Hello(
            config.engine_id, config.incarnation, dict(config.fingerprint), dict(geometries), descriptor
        )
        self._fields = {**config.fingerprint, **geometry_fields(geometries)}
        self._retired: list[Peer] = []

    @property
    def num_ready(self) -> int:
        """Peers with which KV can be exchanged now. Any thread."""
        return sum(link.ready for link in [*self.clients.values(), *self.servers.values()])

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

    def dial(self, address: str) -> Link:
        """A new link, whose HELLO is on its way."""
        link = self.servers[address] = Link(self._channel.dial(address))
        self._say_hello(link)
        return link

    def _say_hello(self, link: Link) -> None:
        link.next_hello = self._clock.monotonic() + self._config.timers.retry
        self._channel.send(link.connection, self._hello)

    def repeat_hello(self, now: float) -> None:
        """Repeat what was not answered; `now` in monotonic seconds."""
        for link in self.servers.values():
            if link.hello is None and now >= link.next_hello:
                self._say_hello(link)

    def greet(self, link: Link, hello: Hello) -> None:
        """Take a peer's HELLO: compare, and connect the transport."""
        link.hello = hello
        try:
            for rank in hello.geometries.values():
                rank.geometry.check()
            compare(self._fields, {**hello.fingerprint, **geometry_fields(hello.geometries)})
            link.peer = self._transport.connect(hello.descriptor)
        except IncompatiblePeerError as error:
            link.refusal = ("incompatible_peer", str(error))
        except BatonError as error:
            link.refusal = ("unreachable_peer", str(error))
        if link.refusal is not None:
            log.warning("no handoff with engine %s: %s", hello.engine_id, link.refusal[1])

    # ------------------------------------------------------------ P's side: engines that dialled us

    def client_hello(self, connection: Connection, hello: Hello) -> tuple[Link, Link] | None:
        """Answer a HELLO. `(old link, new link)` when a process that is known came in a new session."""
        moved: tuple[Link, Link] | None = None
        if connection not in self.clients:
            link = Link(connection)
            same = (old for old in self.clients.values() if old.hello and old.hello.incarnation == hello.incarnation)
            old = next(same, None)
            if old is not None and old.hello is not None and old.hello.descriptor == hello.descriptor:
                # Its copies go on: only the session is new.
                link.hello, link.peer, link.refusal = old.hello, old.peer, old.refusal
                self._channel.drop(old.connection)
                del self.clients[old.connection]
                moved = (old, link)
            else:
                self.greet(link, hello)
            self.clients[connection] = link
        self._channel.send(connection, self._hello)
        return moved

    def check_register(self, link: Link, message: Register) -> Ticket:
        """The ticket of a REGISTER that this link's peer may send, else `ProtocolError` that says why not."""
        config, hello = self._config, link.hello
        if hello is None or link.refusal is not None:
            raise ProtocolError(link.refusal[1] if link.refusal else "a session begins with HELLO")
        ticket = verify(config.ticket_key, message.ticket, self._clock.time())
        if ticket.key != message.key:
            raise ProtocolError("the ticket is for another attempt")
        if (ticket.prefill_engine, ticket.prefill_incarnation) != (config.engine_id, config.incarnation):
            raise ProtocolError("the ticket names another prefill engine")
        if (ticket.decode_engine, ticket.decode_incarnation) != (hello.engine_id, hello.incarnation):
            raise ProtocolError("the ticket names another decode engine")
        for group, (start, stop) in message.wanted.items():
            rank = hello.geometries.get(group)
            if rank is None or start > stop:
                raise ProtocolError(f"group {group!r} or its interval [{start}, {stop}) does not exist")
            if ticket.mode == "push":
                size, count = rank.geometry.page_size, rank.geometry.num_pages
                check_table(group, message.pages.get(group, []), start, stop, size, count)
        return ticket

    # ------------------------------------------------------------ ends

    def hang_up(self, link: Link) -> None:
        """Forget a link. Its transport end stays until no attempt needs it."""
        self._channel.drop(link.connection)
        self.clients.pop(link.connection, None)
        if self.servers.get(link.connection.address) is link:
            del self.servers[link.connection.address]
        if link.peer is not None:
            self._retired.append(link.peer)

    def sweep(self, used: list[Peer | None]) -> None:
        """Drop links whose peer is dead, and disconnect ends that no attempt uses."""
        for link in [*self.clients.values(), *self.servers.values()]:
            if link.peer is not None and not link.peer.alive():
                self.hang_up(link)
        for peer in [peer for peer in self._retired if not any(peer is other for other in used)]:
            self._retired.remove(peer)
            self._transport.disconnect(peer)

    def say_bye(self, reason: str, quiet: bool) -> None:
        """End all sessions; `quiet` tells the peers that our copies have ended."""
        for link in [*self.clients.values(), *self.servers.values()]:
            self._channel.send(link.connection, Bye(reason, quiet))

"""Sessions with peer engines: identity, compatibility, liveness, and the transport's connection of each
(docs/protocol.md, "HELLO").
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future

from baton.clock import Clock
from baton.errors import BatonError, IncompatiblePeerError, ProtocolError
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.messages import Bye, Hello, Renew
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, Ticket
from baton.handoff.session.base import Connection, ControlChannel
from baton.handoff.session.config import AgentConfig
from baton.handoff.session.connecting import TransportEnds
from baton.handoff.session.greeting import Greeting
from baton.handoff.session.health import Health
from baton.handoff.session.session import Session, SessionPhase
from baton.log_limit import LogLimit
from baton.transports.base import Peer, Transport

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

_MAX_DOUBLINGS = 16


class Sessions:
    """All sessions of one rank. Not thread-safe. `gathered`: an `InstanceAgent` joins this rank's pairs; without it, a
    peer may have only one rank.
    """

    def __init__(
        self,
        config: AgentConfig,
        instance: Instance,
        transport: Transport,
        descriptor: bytes,
        channel: ControlChannel,
        clock: Clock,
        gathered: bool = False,
    ) -> None:
        self.clients: dict[Connection, Session] = {}  # engines that dialled us, to decode
        self.servers: dict[str, Session] = {}  # engines that we dialled, by address, to decode from
        self.is_stalled: Callable[[], bool] = lambda: False
        self.config = config
        self._ends = TransportEnds(transport, clock, channel.wake)
        self.channel = channel
        self.clock = clock
        self.greeting = Greeting(config, instance, descriptor, clock, gathered)
        self.health = Health()

    @property
    def num_ready(self) -> int:
        """Thread-safe."""
        return sum(session.ready for session in self._all())

    # ------------------------------------------------------------ D's side: engines we dialled

    def server(self, ticket: Ticket, address: str) -> Session:
        """Dials again if the session is unusable.

        Raises `ProtocolError` for an address that cannot be dialled.
        """
        session = self.servers.get(address)
        if session is None or session.hello is None:
            return session or self.dial(address)
        if session.refusal is None and session.hello.incarnation == ticket.prefill_incarnation:
            return session
        self.hang_up(session)
        return self.dial(address)

    def dial(self, address: str, lost: Session | None = None) -> Session:
        """Open a session and send HELLO; it replaces `lost`.

        If sessions with this address keep ending without a proof, HELLO is sent ever less often, and the peer does not
        count as alive.
        """
        session = self.servers[address] = self._session(self.channel.dial(address))
        if lost is not None:
            session.until = self.clock.monotonic() + MAX_TICKET_LIFE_S if lost.peer is not None else lost.until
            if lost.hello is None:
                session.last_heard, session.redials = lost.last_heard, lost.redials + 1
        if session.redials:
            timers = self.config.timers
            wait_s = min(timers.retry, timers.retry_min * 2 ** min(session.redials, _MAX_DOUBLINGS))
            session.next_hello = self.clock.monotonic() + wait_s
        else:
            self._send_hello(session)
        return session

    def _session(self, connection: Connection) -> Session:
        now = self.clock.monotonic()
        return Session(connection, used=now, last_heard=now, lease=self.config.timers.lease)

    def _send_hello(self, session: Session) -> None:
        session.next_hello = self.clock.monotonic() + self.config.timers.retry
        known = bool(session.challenge)
        hello = self.greeting.own_hello(session.connection, with_descriptor=known)
        if known:
            hello = self.greeting.with_proof("dialled", session.connection.address, session.challenge, hello)
        self.channel.send(session.connection, hello)

    def repeat_hello(self, now: float) -> None:
        for session in self.servers.values():
            if session.hello is None and now >= session.next_hello:
                self._send_hello(session)

    def server_hello(self, session: Session, hello: Hello) -> bool:
        """Handle an answer to HELLO. True if it opens the session, or the peer is refused.

        Raises `ProtocolError` if the sender does not prove that it knows the ticket key.
        """
        address = session.connection.address
        if not self.greeting.is_proven("answered", address, session.connection, hello):
            raise ProtocolError(f"who answers at {address} does not prove that it knows the ticket key")
        if hello.descriptor is None:
            # Answer only new challenges: HELLO is repeated anyway, and two sides that answered every one would never
            # stop.
            if hello.challenge != session.challenge:
                session.challenge = hello.challenge
                self._send_hello(session)
            return False
        session.connection.key = self.greeting.session_key(session.connection.challenge, hello.challenge)
        self._greet(session, hello)
        return True

    def _greet(self, session: Session, hello: Hello) -> None:
        try:
            self.greeting.agree(session, hello)
        except IncompatiblePeerError as error:
            session.refusal = ("incompatible_peer", str(error))
            session.step("refuse")
        except BatonError as error:
            session.refusal = ("unreachable_peer", str(error))
            session.step("not reached")
        else:
            self._connect(session)
        if session.refusal is not None:
            log.warning("no handoff with engine %s: %s", hello.engine_id, session.refusal[1])

    def _connect(self, session: Session) -> None:
        assert session.hello is not None
        session.step("connect")
        session.connecting = self._ends.begin(session.hello.descriptor or b"")
        if session.connecting.done():
            self._connected(session, session.connecting, session.hello)

    def _connected(self, session: Session, future: Future[Peer], hello: Hello) -> None:
        session.connecting = None
        try:
            session.peer = self._ends.result(future, hello.descriptor or b"")
        except BatonError as error:
            session.refusal = ("unreachable_peer", str(error))
            session.step("not reached")
        else:
            session.step("connected")

    def reach_again(self, session: Session) -> None:
        """Connect again to an unreachable peer that now sends a claim."""
        if session.phase is SessionPhase.UNREACHABLE:
            session.refusal = None
            self._connect(session)

    def poll(self) -> list[Session]:
        """Sessions whose connecting ended since the last call."""
        self._ends.poll()
        ended = []
        for session in self._all():
            if session.hello is not None and session.connecting is not None and session.connecting.done():
                self._connected(session, session.connecting, session.hello)
                if session.refusal is not None:
                    log.warning("no handoff with engine %s: %s", session.hello.engine_id, session.refusal[1])
                ended.append(session)
        return ended

    # ------------------------------------------------------------ P's side: engines that dialled us

    def client_hello(self, connection: Connection, hello: Hello) -> Session:
        """The returned session is open once the peer has proven itself.

        Raises `ProtocolError`.
        """
        session = self.clients.setdefault(connection, self._session(connection))
        proven = self.greeting.is_proven("dialled", self.channel.address, connection, hello)
        if proven and session.hello is None:
            connection.proven = True
            connection.key = self.greeting.session_key(hello.challenge, connection.challenge)
            session.hello = hello
            for old in [old for old in self.clients.values() if old is not session and old.is_same(session)]:
                # Its attempts continue in the new session. The old transport connection may be broken at the other end.
                self.hang_up(old)
            self._greet(session, hello)
        own = self.greeting.own_hello(connection, with_descriptor=proven)
        self.channel.send(connection, self.greeting.with_proof("answered", self.channel.address, hello.challenge, own))
        if hello.proof and not proven:
            raise ProtocolError(f"HELLO of {hello.engine_id!r} proves no knowledge of the ticket key")
        return session

    def _all(self) -> list[Session]:
        return [*self.clients.values(), *self.servers.values()]

    def until_renew(self, now: float) -> float:
        """A RENEW that is late would be sent during a handoff."""
        sent = [session.renew_sent for session in self._all() if session.established]
        return max(0.0, min(sent) + self.config.timers.renew - now) if sent else math.inf

    def renew(self, now: float) -> None:
        """Renew all when one is due."""
        timers = self.config.timers
        early = timers.renew / 2 if self.until_renew(now) == 0.0 else 0.0
        for session in self._all():
            if session.established and now >= session.renew_sent + timers.renew - early:
                session.nonce, session.renew_sent = session.nonce + 1, now
                self.channel.send(session.connection, Renew(timers.lease, session.nonce, stalled=self.is_stalled()))

    def renewed(self, session: Session, message: Renew) -> None:
        session.lease = message.lease
        if not message.echo:
            stalled = self.is_stalled()
            echo = Renew(self.config.timers.lease, message.nonce, echo=True, stalled=stalled)
            self.channel.send(session.connection, echo)
        elif message.nonce == session.nonce:
            sample = self.clock.monotonic() - session.renew_sent
            session.round_trip = sample if session.round_trip is None else (3 * session.round_trip + sample) / 4

    def may_return(self, session: Session) -> bool:
        """Whether the session's process may still live and need the outcome of its attempts. No attempt outlives
        `MAX_TICKET_LIFE_S`, unless its engine was paused that long.
        """
        if session.peer is not None:
            return not session.peer.dead()
        return self.clock.monotonic() < session.until

    def restart_leases(self, now: float) -> None:
        """This process was paused, so it cannot tell which peers were silent."""
        for session in self._all():
            session.last_heard = now

    def expired(self, now: float) -> list[Session]:
        return [session for session in self._all() if now - session.last_heard > session.lease]

    def hang_up(self, session: Session) -> None:
        """Its transport peer stays until no attempt needs it."""
        self.channel.drop(session.connection)
        self.clients.pop(session.connection, None)
        if self.servers.get(session.connection.address) is session:
            del self.servers[session.connection.address]
        if session.connecting is not None:
            self._ends.abandon(session.connecting)
            session.connecting = None
        session.step("hang up")
        if session.peer is not None:
            self._ends.retire(session.peer)

    def idle(self, now: float) -> list[Session]:
        idle_s = self.config.timers.idle
        return [one for one in self.servers.values() if one.hello is not None and now >= one.used + idle_s]

    def dead(self) -> list[Session]:
        return [session for session in self._all() if session.peer is not None and not session.peer.alive()]

    def sweep(self, used: list[Peer]) -> None:
        self._ends.sweep(used)

    def say_bye(self, reason: str, quiet: bool) -> None:
        for session in self._all():
            self.channel.send(session.connection, Bye(reason, quiet))

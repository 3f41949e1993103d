"""Finds the session and attempt of each message, and refuses forbidden ones. Not thread-safe.

A server is an engine that we dialled, to decode from; a client dialled us.
"""

from __future__ import annotations

import logging

from baton.errors import ProtocolError
from baton.handoff.agent.attempts import DecodeAttempt
from baton.handoff.agent.machine_runner import MachineRunner
from baton.handoff.agent.registrations import Registrations
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import (
    Announce,
    AttemptMessage,
    Bye,
    Cancel,
    Cancelled,
    ControlMessage,
    Hello,
    ReadDone,
    Ready,
    Register,
    Renew,
    Repair,
)
from baton.handoff.protocol.ticket import Ticket
from baton.handoff.session.base import Connection, NoSession, unanswered
from baton.handoff.session.session import Session
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())


class Routing:
    def __init__(self, runner: MachineRunner) -> None:
        self._runner = runner
        self._self = runner.config.incarnation, runner.instance.rank
        self._channel, self._sessions, self._clock = runner.channel, runner.sessions, runner.clock
        self.registrations = Registrations(runner)

    def on_message(self, connection: Connection, message: ControlMessage | NoSession) -> None:
        """Drops and counts forbidden messages."""
        try:
            if isinstance(message, NoSession):
                self._no_session(connection, message)
            elif connection.identity is None:
                self._from_server(connection, message)
            else:
                self._from_client(connection, message)
        except ProtocolError as error:
            self._runner.counters.count("rejected")
            log.warning("rejected a message: %s", error)

    # ------------------------------------------------------------ D's side

    def _from_server(self, connection: Connection, message: ControlMessage) -> None:
        session = self._sessions.servers.get(connection.address)
        if session is None or session.connection is not connection:
            return
        if isinstance(message, Hello) and session.hello is not None:
            return  # not authenticated, so it does not renew the lease
        if isinstance(message, Hello):
            self._on_hello(session, message)
        elif isinstance(message, Bye):
            self._server_left(session, message)
        elif session.hello is None:
            raise ProtocolError("a session begins with HELLO")
        if session.hello is None:
            return  # the handshake continues, perhaps with a restarted engine
        session.last_heard = self._clock.monotonic()
        if isinstance(message, Renew):
            self._sessions.renewed(session, message)
            if message.stalled:
                self._runner.stalled(session)
        elif isinstance(message, AttemptMessage):
            self._answered(session, message)

    def _no_session(self, connection: Connection, found: NoSession) -> None:
        """Attempts unknown to P need not wait for the lease. HELLO is repeated for others."""
        session = self._sessions.servers.get(connection.address)
        if session is None or session.connection is not connection or session.hello is not None:
            return
        for attempt in self._decodes_at(connection.address):
            if not attempt.machine.reached:
                self._runner.fail(attempt, found.reason, found.text)

    def _on_hello(self, session: Session, message: Hello) -> None:
        try:
            opened = self._sessions.server_hello(session, message)
        except ProtocolError as error:
            for attempt in self._decodes_at(session.connection.address):
                self._runner.fail(attempt, "unreachable_peer", str(error))
            raise
        if opened:
            for attempt in self._decodes_at(session.connection.address):
                self.join(attempt, session, message)

    def _answered(self, session: Session, message: AttemptMessage) -> None:
        key, hello = message.key, session.hello
        if hello is None or not (session.established or isinstance(message, Cancel | Cancelled)):
            raise ProtocolError("a session begins with HELLO")
        if key.ends != ((hello.incarnation, hello.instance.rank), self._self):
            raise ProtocolError("message for an attempt of other engines")
        known = self._runner.decodes.get(key)
        if known is not None:
            known.on_answer(self._clock.monotonic())
            if isinstance(message, Ready):
                if session.is_connecting:
                    return  # copies need the connection; P repeats READY
                known.on_request(session)
            self._runner.feed(known, ev.Received(message))
        elif isinstance(message, Cancel):
            # Only ended attempts are forgotten: no read is outstanding here.
            self._channel.send(session.connection, Cancelled(key, message.reason))
        else:
            raise ProtocolError("message for an attempt that is not open here")

    def _decodes_at(self, address: str) -> list[DecodeAttempt]:
        """Attempts with that engine, including ended ones: P may still wait for their outcome."""
        table = self._runner.decodes
        return [attempt for attempt in [*table.live.values(), *table.ended.values()] if attempt.address == address]

    def dial(self, attempt: DecodeAttempt, ticket: Ticket) -> None:
        try:
            session = self._sessions.server(ticket, attempt.address)
        except ProtocolError as error:
            self._runner.fail(attempt, "unreachable_peer", str(error))
            return
        session.used = self._clock.monotonic()
        if session.hello is not None:
            self.join(attempt, session, session.hello)

    def _dial_again(self, lost: Session) -> None:
        address = lost.connection.address
        waiting = self._decodes_at(address)
        if lost.peer is not None and lost.peer.dead() and lost.hello is not None:
            # Writes of a dead process have ended.
            gone = lost.hello.incarnation
            waiting = [attempt for attempt in waiting if attempt.machine.key.prefill_incarnation != gone]
        if not self._sessions.may_return(lost) and not waiting:
            return
        try:
            self._sessions.dial(address, lost)
        except ProtocolError as error:
            for attempt in self._decodes_at(address):
                self._runner.fail(attempt, "unreachable_peer", str(error))

    def join(self, attempt: DecodeAttempt, session: Session, hello: Hello) -> None:
        """P's HELLO is known and connecting has ended: register, or fail."""
        if session.is_connecting:
            return
        runner = self._runner
        if session.refusal is not None:
            runner.fail(attempt, *session.refusal)
            # Even an incompatible P may hold pages.
            runner.feed(attempt, ev.PeerReady())
        elif hello.incarnation != attempt.machine.key.prefill_incarnation:
            runner.fail(attempt, "peer_lost", f"another engine is at {attempt.address} now: {hello.engine_id}")
        elif wrong := attempt.wrong_rank(hello.instance):
            runner.fail(attempt, "incompatible_peer", wrong)
        else:
            unhealthy = self._sessions.health.why_not(attempt.machine.key.ends[0])
            if unhealthy and not attempt.machine.reached:
                runner.fail(attempt, "unhealthy_peer", unhealthy)
            attempt.on_hello(session)
            runner.on_peer_hello(attempt, session.hello or hello)
            runner.feed(attempt, ev.PeerReady(session.groups))

    def connected(self, session: Session) -> None:
        if session.connection.identity is None and session.hello is not None:
            for decode in self._decodes_at(session.connection.address):
                self.join(decode, session, session.hello)
        elif session.connection.identity is not None:
            for prefill in self._runner.prefills.live.values():
                if prefill.session is session:
                    prefill.on_hello(session)
            self.registrations.retry()

    def _server_left(self, session: Session, bye: Bye) -> None:
        address = session.connection.address
        self._sessions.hang_up(session)
        if bye.reason == "unknown_session":
            # P restarted, or forgot this session.
            self._dial_again(session)
            return
        for attempt in self._decodes_at(address):
            # A process can only vouch for its own copies.
            own = session.hello is not None and session.hello.incarnation == attempt.machine.key.prefill_incarnation
            self._runner.fail(attempt, "peer_lost", f"the prefill engine left: {bye.reason}", bye.quiet and own)

    # ------------------------------------------------------------ P's side

    def _from_client(self, connection: Connection, message: ControlMessage) -> None:
        if isinstance(message, Hello):
            session = self._sessions.client_hello(connection, message)
            for attempt in self._runner.prefills.live.values():
                # The same process in a new session: it expects the pending answers.
                if attempt.session is not None and attempt.session.is_same(session):
                    attempt.session = session
                    attempt.on_hello(session)
            return
        known = self._sessions.clients.get(connection)
        if known is None or known.hello is None:
            if known is not None:
                # An unknown peer, or one whose session was lost here.
                self._channel.send(connection, Bye("unknown_session"))
                self._sessions.hang_up(known)
            raise ProtocolError("a session begins with HELLO, and a proof that the ticket key is known")
        known.last_heard = self._clock.monotonic()
        if isinstance(message, Bye):
            self._sessions.hang_up(known)
            self._client_lost(known, "peer_lost", f"the decode engine left: {message.reason}", message.quiet)
        elif isinstance(message, Renew):
            self._sessions.renewed(known, message)
            if message.stalled:
                self._runner.stalled(known)
        elif isinstance(message, AttemptMessage):
            self._attempt_message(known, known.hello, message)

    def _client_lost(self, session: Session, reason: str, text: str, quiet: bool = False) -> None:
        for attempt in list(self._runner.prefills.live.values()):
            if attempt.session is session:
                self._runner.fail(attempt, reason, text, quiet)

    def _attempt_message(self, session: Session, hello: Hello, message: AttemptMessage) -> None:
        key = message.key
        if key.ends != (self._self, (hello.incarnation, hello.instance.rank)):
            raise ProtocolError("message for an attempt of other engines")
        attempt = self._runner.prefills.get(key)
        if isinstance(message, Announce | Register):
            if attempt is not None and attempt.machine.claimed and not attempt.machine.begun_with(message.ticket):
                # No NACK: it would end the running attempt.
                raise ProtocolError("the ticket is not the one by which this attempt was claimed")
            self.registrations.take(session, message)
            return
        if attempt is None:
            if not isinstance(message, Cancel | ReadDone | Repair):
                raise ProtocolError("message for an attempt that is not open here")
            if not isinstance(message, Cancel):
                # Only finished attempts are forgotten.
                self._channel.send(session.connection, Cancelled(key, "forgotten"))
                return
            self.registrations.cancel(key, message.reason)
            self._channel.send(session.connection, Cancelled(key, message.reason))
            return
        if not attempt.is_from_peer(session):
            raise ProtocolError("message for an attempt of other engines")
        attempt.session = session
        if isinstance(message, Repair) and session.is_connecting:
            return  # copies need the connection; D repeats REPAIR
        (attempt.on_request if isinstance(message, Repair) else attempt.on_hello)(session)
        self._runner.feed(attempt, ev.Received(message))

    # ------------------------------------------------------------ lost peers

    def close_idle(self, now: float) -> None:
        """The next attempt dials again."""
        idle = self._sessions.idle(now)
        if not idle:
            return
        table = self._runner.decodes
        remembered = {attempt.address for attempt in [*table.live.values(), *table.ended.values()]}
        for session in idle:
            if session.connection.address in remembered:
                session.used = now
            elif not session.is_connecting:
                self._channel.send(session.connection, Bye("idle", quiet=True))
                self._sessions.hang_up(session)

    def drop_dead(self) -> None:
        for session in self._sessions.dead():
            self._sessions.hang_up(session)
            if session.connection.identity is None:
                # Perhaps only the connection is lost.
                self._dial_again(session)

    def evict(self, now: float) -> None:
        for session in self._sessions.expired(now):
            if session.hello is None:
                self._unanswered(session, now)
            else:
                self._silent(session, session.hello)

    def _unanswered(self, session: Session, now: float) -> None:
        address = session.connection.address
        found = unanswered(address)
        for attempt in self._decodes_at(address):
            self._runner.fail(attempt, found.reason, found.text)
        # Pages here or at P may wait for the outcome: keep dialling.
        if self._sessions.may_return(session) or self._decodes_at(address):
            session.last_heard = now
        else:
            self._sessions.hang_up(session)

    def _silent(self, session: Session, hello: Hello) -> None:
        self._runner.counters.count("lost_leases")
        text = f"engine {hello.engine_id} was silent for {session.lease:g} s"
        log.warning("%s: evicted", text)
        self._sessions.hang_up(session)
        if session.connection.identity is not None:
            self._client_lost(session, "lease_expired", text)
            return
        for attempt in self._decodes_at(session.connection.address):
            self._runner.fail(attempt, "lease_expired", text)
        self._dial_again(session)

"""D's side of a rank's sessions: the prefill engines that this rank dialled. Not thread-safe."""

from __future__ import annotations

from baton.errors import ProtocolError
from baton.handoff.agent.attempts import DecodeAttempt
from baton.handoff.agent.machine_runner import MachineRunner
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import (
    AttemptMessage,
    Bye,
    Cancel,
    Cancelled,
    ControlMessage,
    Hello,
    Ready,
    Renew,
)
from baton.handoff.protocol.ticket import Ticket
from baton.handoff.session.base import Connection, NoSession, unanswered
from baton.handoff.session.session import Session


class DecodeRouting:
    """Finds the decode attempts that a message, or the state of a session with a prefill engine, concerns. One address
    may have attempts with several incarnations of its engine."""

    def __init__(self, runner: MachineRunner) -> None:
        self._runner = runner
        self._own_end = runner.config.incarnation, runner.instance.rank
        self._channel, self._sessions, self._clock = runner.channel, runner.sessions, runner.clock

    # ------------------------------------------------------------ messages

    def on_message(self, connection: Connection, message: ControlMessage) -> None:
        """Raises `ProtocolError` for a forbidden message."""
        session = self._sessions.servers.get(connection.address)
        if session is None or session.connection is not connection:
            return
        if isinstance(message, Hello) and session.hello is not None:
            return  # not authenticated, so it does not renew the lease
        if isinstance(message, Hello):
            self._on_hello(session, message)
        elif isinstance(message, Bye):
            self._on_bye(session, message)
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
            self._on_attempt_message(session, message)

    def on_no_session(self, connection: Connection, found: NoSession) -> None:
        """Fail the attempts that P does not know: they need not wait for the lease. HELLO is repeated for others."""
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
            self._fail_attempts(session.connection.address, "unreachable_peer", str(error))
            raise
        if opened:
            for attempt in self._decodes_at(session.connection.address):
                self.join(attempt, session, message)

    def _on_bye(self, session: Session, bye: Bye) -> None:
        address = session.connection.address
        self._sessions.hang_up(session)
        if bye.reason == "unknown_session":
            # P restarted, or forgot this session.
            self.dial_again(session)
            return
        for attempt in self._decodes_at(address):
            # A process can only vouch for its own copies.
            own = session.hello is not None and session.hello.incarnation == attempt.machine.key.prefill_incarnation
            self._runner.fail(attempt, "peer_lost", f"the prefill engine left: {bye.reason}", bye.quiet and own)

    def _on_attempt_message(self, session: Session, message: AttemptMessage) -> None:
        key, hello = message.key, session.hello
        if hello is None or not (session.established or isinstance(message, Cancel | Cancelled)):
            raise ProtocolError("a session begins with HELLO")
        if key.ends != ((hello.incarnation, hello.instance.rank), self._own_end):
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

    def _fail_attempts(self, address: str, reason: str, text: str) -> None:
        for attempt in self._decodes_at(address):
            self._runner.fail(attempt, reason, text)

    # ------------------------------------------------------------ sessions

    def dial(self, attempt: DecodeAttempt, ticket: Ticket) -> None:
        """Find or open the session with the attempt's prefill engine, and join the attempt if it is open."""
        try:
            session = self._sessions.server(ticket, attempt.address)
        except ProtocolError as error:
            self._runner.fail(attempt, "unreachable_peer", str(error))
            return
        session.used = self._clock.monotonic()
        if session.hello is not None:
            self.join(attempt, session, session.hello)

    def dial_again(self, lost: Session) -> None:
        """Open a new session in place of `lost`, if its engine may return or an attempt needs it."""
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
            self._fail_attempts(address, "unreachable_peer", str(error))

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

    def on_connected(self, session: Session) -> None:
        if session.hello is not None:
            for attempt in self._decodes_at(session.connection.address):
                self.join(attempt, session, session.hello)

    def close_idle(self, now: float) -> None:
        """End sessions that have had no attempt for `Timers.idle`. The next attempt dials again."""
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

    def on_unanswered(self, session: Session, now: float) -> None:
        """Nothing at the session's address has answered HELLO for a lease."""
        address = session.connection.address
        found = unanswered(address)
        self._fail_attempts(address, found.reason, found.text)
        # Pages here or at P may wait for the outcome: keep dialling.
        if self._sessions.may_return(session) or self._decodes_at(address):
            session.last_heard = now
        else:
            self._sessions.hang_up(session)

    def on_lease_expired(self, session: Session, text: str) -> None:
        """The engine of a closed session was silent for a lease."""
        self._fail_attempts(session.connection.address, "lease_expired", text)
        self.dial_again(session)

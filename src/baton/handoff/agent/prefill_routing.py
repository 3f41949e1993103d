"""P's side of a rank's sessions: the decode engines that dialled this rank. Not thread-safe."""

from __future__ import annotations

from baton.errors import ProtocolError
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
    Register,
    Renew,
    Repair,
)
from baton.handoff.session.base import Connection
from baton.handoff.session.session import Session


class PrefillRouting:
    """Finds the prefill attempts that a message, or the state of a session with a decode engine, concerns. Claims
    (ANNOUNCE, REGISTER) go to `registrations`."""

    def __init__(self, runner: MachineRunner, registrations: Registrations) -> None:
        self._runner, self._registrations = runner, registrations
        self._own_end = runner.config.incarnation, runner.instance.rank
        self._channel, self._sessions, self._clock = runner.channel, runner.sessions, runner.clock

    def on_message(self, connection: Connection, message: ControlMessage) -> None:
        """Raises `ProtocolError` for a forbidden message."""
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
            self.fail_attempts(known, "peer_lost", f"the decode engine left: {message.reason}", message.quiet)
        elif isinstance(message, Renew):
            self._sessions.renewed(known, message)
            if message.stalled:
                self._runner.stalled(known)
        elif isinstance(message, AttemptMessage):
            self._on_attempt_message(known, known.hello, message)

    def fail_attempts(self, session: Session, reason: str, text: str, quiet: bool = False) -> None:
        for attempt in list(self._runner.prefills.live.values()):
            if attempt.session is session:
                self._runner.fail(attempt, reason, text, quiet)

    def on_connected(self, session: Session) -> None:
        for attempt in self._runner.prefills.live.values():
            if attempt.session is session:
                attempt.on_hello(session)
        self._registrations.retry()

    def _on_attempt_message(self, session: Session, hello: Hello, message: AttemptMessage) -> None:
        key = message.key
        if key.ends != (self._own_end, (hello.incarnation, hello.instance.rank)):
            raise ProtocolError("message for an attempt of other engines")
        attempt = self._runner.prefills.get(key)
        if isinstance(message, Announce | Register):
            if attempt is not None and attempt.machine.claimed and not attempt.machine.begun_with(message.ticket):
                # No NACK: it would end the running attempt.
                raise ProtocolError("the ticket is not the one by which this attempt was claimed")
            self._registrations.take(session, message)
            return
        if attempt is None:
            if not isinstance(message, Cancel | ReadDone | Repair):
                raise ProtocolError("message for an attempt that is not open here")
            if not isinstance(message, Cancel):
                # Only finished attempts are forgotten.
                self._channel.send(session.connection, Cancelled(key, "forgotten"))
                return
            self._registrations.cancel(key, message.reason)
            self._channel.send(session.connection, Cancelled(key, message.reason))
            return
        if not attempt.is_from_peer(session):
            raise ProtocolError("message for an attempt of other engines")
        attempt.session = session
        if isinstance(message, Repair) and session.is_connecting:
            return  # copies need the connection; D repeats REPAIR
        (attempt.on_request if isinstance(message, Repair) else attempt.on_hello)(session)
        self._runner.feed(attempt, ev.Received(message))

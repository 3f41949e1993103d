"""Passes control messages and lost peers to the side of the handoff that they concern. Not thread-safe."""

from __future__ import annotations

import logging

from baton.errors import ProtocolError
from baton.handoff.agent.decode_routing import DecodeRouting
from baton.handoff.agent.machine_runner import MachineRunner
from baton.handoff.agent.prefill_routing import PrefillRouting
from baton.handoff.agent.registrations import Registrations
from baton.handoff.protocol.messages import ControlMessage, Hello
from baton.handoff.session.base import Connection, NoSession
from baton.handoff.session.session import Session
from baton.log_limit import LogLimit

log = logging.getLogger(__name__)
log.addFilter(LogLimit())


class Routing:
    """Messages of engines that this rank dialled, prefill engines, are for `decode`; those of engines that dialled it
    are for `prefill`."""

    def __init__(self, runner: MachineRunner) -> None:
        self._runner, self._sessions = runner, runner.sessions
        self.registrations = Registrations(runner)
        self.decode = DecodeRouting(runner)
        self.prefill = PrefillRouting(runner, self.registrations)

    def on_message(self, connection: Connection, message: ControlMessage | NoSession) -> None:
        """Drops and counts forbidden messages."""
        try:
            if isinstance(message, NoSession):
                self.decode.on_no_session(connection, message)
            elif connection.identity is None:
                self.decode.on_message(connection, message)
            else:
                self.prefill.on_message(connection, message)
        except ProtocolError as error:
            self._runner.counters.count("rejected")
            log.warning("rejected a message: %s", error)

    def on_connected(self, session: Session) -> None:
        """The transport has connected to the session's engine, or cannot."""
        side = self.decode if session.connection.identity is None else self.prefill
        side.on_connected(session)

    def drop_dead(self) -> None:
        """End sessions whose peer is gone, by the transport's knowledge."""
        for session in self._sessions.dead():
            self._sessions.hang_up(session)
            if session.connection.identity is None:
                # Perhaps only the connection is lost.
                self.decode.dial_again(session)

    def evict(self, now: float) -> None:
        """End sessions that were silent for a lease."""
        for session in self._sessions.expired(now):
            if session.hello is None:
                self.decode.on_unanswered(session, now)
            else:
                self._evict(session, session.hello)

    def _evict(self, session: Session, hello: Hello) -> None:
        self._runner.counters.count("lost_leases")
        text = f"engine {hello.engine_id} was silent for {session.lease:g} s"
        log.warning("%s: evicted", text)
        self._sessions.hang_up(session)
        if session.connection.identity is None:
            self.decode.on_lease_expired(session, text)
        else:
            self.prefill.fail_attempts(session, "lease_expired", text)

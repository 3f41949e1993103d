"""Phases of a session: what its table does not define is an error that tells the session's history."""

from __future__ import annotations

import pytest

from baton.errors import UndefinedTransitionError
from baton.handoff.session.base import Connection
from baton.handoff.session.session import SESSION, Session, SessionPhase


@pytest.mark.parametrize("event", SESSION.steps)
def test_an_ended_session_takes_no_further_step(event: str) -> None:
    session = Session(Connection(1, None))
    session.step("hang up")
    with pytest.raises(UndefinedTransitionError, match="before: hang up -> ended"):
        session.step(event)
    assert session.phase is SessionPhase.ENDED


def test_attempts_may_use_a_session_from_connection_to_hang_up() -> None:
    session, found = Session(Connection(1, None)), []
    for event in ("connect", "not reached", "connect", "connected", "hang up"):
        session.step(event)
        found.append((session.established, session.ready))
    assert found == [(True, False), (False, False), (True, False), (True, True), (False, False)]

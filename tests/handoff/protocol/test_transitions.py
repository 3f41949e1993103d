"""Transitions that no table has are errors that tell the attempt's last events."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import ProtocolError, UndefinedTransitionError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.attempt_machine import HISTORY
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.handoff.protocol.phases import DecodePhase
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.kv.interval import Interval

KEY = AttemptKey(b"0" * 16, 0, "p", "d")
SEEDS = Seeds(7, None, [8])
WANTED, PAGES = {"target": Interval(0, 8)}, {"target": [1, 2]}
COMMIT = ev.Received(msg.Commit(KEY, final={"target": 8}, seeds=SEEDS))
TO_P = [
    msg.Announce(KEY, ticket="t"),
    msg.Register(KEY, ticket="t", wanted=WANTED, pages=PAGES),
    *(msg.ReadDone(KEY), msg.Repair(KEY, 1, {}), msg.Ack(KEY)),
]
TO_D = [
    *(COMMIT.message, msg.Ready(KEY, final={"target": 8}, pages=PAGES), msg.Confirm(KEY, SEEDS)),
    *(msg.Finished(KEY, SEEDS), msg.Admitted(KEY), msg.Progress(KEY, {}), msg.Nack(KEY, "refused")),
]


def source(*events: ev.MachineEvent) -> PrefillHandoff:
    machine = PrefillHandoff(KEY, "push", "t", ["target"])
    for event in events:
        machine.handle(event)
    return machine


def destination(*events: ev.MachineEvent) -> DecodeHandoff:
    machine = DecodeHandoff(KEY, "push", "t")
    for event in events:
        machine.handle(event)
    return machine


@pytest.mark.parametrize("message", TO_D)
def test_p_refuses_what_p_itself_would_send(message: Any) -> None:
    machine = source(ev.Opened())
    with pytest.raises(UndefinedTransitionError, match="before: opened"):
        machine.handle(ev.Received(message))
    assert machine.handle(ev.Abort("gone")) == [ev.Notify(ev.PrefillReleased(KEY, "gone"))]  # D was not heard of


@pytest.mark.parametrize("message", TO_P)
def test_d_refuses_what_d_itself_would_send(message: Any) -> None:
    machine = destination(ev.PeerReady())
    with pytest.raises(UndefinedTransitionError, match="before: peer ready, reach -> announced"):
        machine.handle(ev.Received(message))
    assert machine.phase is DecodePhase.ANNOUNCED


@pytest.mark.parametrize(
    "event", [ev.PagesGiven(), ev.Declared(8, PAGES, {"target": 8}), ev.Sampled(SEEDS, False, {"target": 8})]
)
def test_an_engine_says_nothing_of_a_leg_that_it_has_not_opened(event: ev.MachineEvent) -> None:
    machine = source(ev.Received(TO_P[0]))
    with pytest.raises(UndefinedTransitionError, match=r"P's engine: .* in phase 'absent'; before: ANNOUNCE"):
        machine.handle(event)


def test_pages_are_given_once() -> None:
    machine = destination(ev.PeerReady(), ev.Placed(WANTED, PAGES))
    with pytest.raises(UndefinedTransitionError, match="registered"):
        machine.handle(ev.Placed(WANTED, PAGES))


def test_nothing_is_committed_after_a_failure() -> None:
    machine = destination(ev.PeerReady(), ev.Placed(WANTED, PAGES), ev.Abort("gone"))
    message = COMMIT.message
    assert isinstance(message, msg.Commit)
    with pytest.raises(ProtocolError) as caught:
        machine._commit(message, 0, 0)
    assert str(caught.value) == (
        "D's machine: commit cannot happen in phase 'closing'; before: peer ready, reach -> announced, placed, "
        "place -> registered, abort, fail (push) -> closing"
    )


def test_a_history_is_short() -> None:
    machine = destination(ev.PeerReady(), *[ev.Tick(), ev.Received(msg.Admitted(KEY))] * 50)
    assert len(machine.history) == HISTORY
    assert destination(ev.PeerReady(), *[ev.Tick()] * 50).history[-2:] == ["reach -> announced", "tick"]


@pytest.mark.parametrize("proof", [ev.Received(msg.Cancelled(KEY, "gone")), ev.PeerLost("peer_lost", "", fenced=True)])
def test_a_commit_before_register_proves_no_quiet(proof: ev.MachineEvent) -> None:
    """P writes after REGISTER, whatever it said before."""
    machine = destination(ev.PeerReady())
    assert machine.handle(COMMIT) == []
    machine.handle(ev.Placed(WANTED, PAGES))
    released = ev.Notify(ev.DecodeReleased(KEY))
    assert machine.handle(ev.Abort("gone")) == [ev.Send(msg.Cancel(KEY, "gone"))]
    assert released in machine.handle(proof)


def test_a_commit_of_an_attempt_that_was_given_up_before_register_ends_nothing() -> None:
    machine = destination(ev.PeerReady(), ev.Abort("gone"))
    assert machine.handle(COMMIT) == [ev.Send(msg.Cancelled(KEY, "gone"))]
    assert machine.phase is DecodePhase.WITHDRAWN
    assert machine.handle(ev.Tick()) == [ev.Send(msg.Cancel(KEY, "gone"))]

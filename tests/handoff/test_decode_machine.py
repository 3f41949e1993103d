"""D's state machine, event by event."""

from __future__ import annotations

from typing import Literal

import pytest

from baton.handoff.decode import DecodeHandoff
from baton.handoff.events import (
    Abort,
    Action,
    CancelCopies,
    CopyEnded,
    Deadline,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeReleased,
    Notify,
    PeerLost,
    PeerReady,
    Received,
    Send,
    StartCopy,
    Tick,
)
from baton.handoff.messages import (
    Ack,
    AttemptKey,
    Cancel,
    Cancelled,
    Commit,
    Confirm,
    Finished,
    Nack,
    ReadDone,
    Ready,
    Register,
    Seeds,
)

KEY = AttemptKey(b"0" * 16, 0, "p", "d")
SEEDS = Seeds(7, None, [8])
WANTED = {"target": (2, 8), "draft": (7, 8)}
TABLES = {"draft": [3, 4], "target": [8, 9]}
COMMIT = Commit(KEY, final={"target": 8, "draft": 8}, seeds=SEEDS, num_bytes=50, num_runs=5)
READY = Ready(KEY, final={"target": 8, "draft": 8}, pages={"target": [1, 2], "draft": [5, 6]})
RELEASED = Notify(DecodeReleased(KEY))


def failed(reason: str, message: str = "") -> Notify:
    return Notify(DecodeFailed(KEY, reason, message))


def machine(mode: Literal["push", "pull"] = "push", *events: object) -> tuple[DecodeHandoff, list[Action]]:
    made = DecodeHandoff(KEY, mode, "t", WANTED, TABLES)
    actions: list[Action] = []
    for event in (PeerReady(), *events):
        actions = made.handle(event)  # type: ignore[arg-type]
    return made, actions


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_register_waits_for_the_session_and_is_repeated(mode: Literal["push", "pull"]) -> None:
    d = DecodeHandoff(KEY, mode, "t", WANTED, TABLES)
    assert d.handle(Tick()) == []
    register = Register(KEY, ticket="t", wanted=WANTED, pages=TABLES if mode == "push" else {})
    assert d.handle(PeerReady()) == [Send(register)] == d.handle(Tick()) == d.handle(PeerReady())


def test_push_commits_on_commit_alone() -> None:
    d, _ = machine()
    for other in (READY, Confirm(KEY, SEEDS)):
        assert d.handle(Received(other)) == []
    assert d.handle(Received(COMMIT)) == [Send(Ack(KEY)), Notify(DecodeCommitted(KEY, SEEDS, 50, 5))]
    assert d.closed
    for late in (COMMIT, Cancel(KEY, "late"), Finished(KEY, SEEDS)):
        assert d.handle(Received(late)) == [Send(Ack(KEY))]
    for nothing in (
        Received(Cancelled(KEY, "late")),
        Deadline(),
        Abort("late"),
        Tick(),
        PeerLost("x", "", True),
    ):
        assert d.handle(nothing) == []


@pytest.mark.parametrize("final", [{"target": 8}, {"target": 7, "draft": 8}, {"target": 8, "draft": 7}])
def test_a_commit_with_a_group_missing_or_short_is_no_commit(final: dict[str, int]) -> None:
    d, _ = machine()
    actions = d.handle(Received(Commit(KEY, final=final, seeds=SEEDS)))
    assert isinstance(actions[0], Notify)
    assert isinstance(actions[0].event, DecodeFailed)
    assert actions[0].event.reason == "incomplete_commit"
    assert actions[1:] == [Send(Cancelled(KEY, "incomplete_commit")), RELEASED]
    assert d.handle(Received(COMMIT)) == [Send(Cancelled(KEY, "incomplete_commit"))]


def test_pull_reads_then_waits_for_confirm() -> None:
    d, actions = machine("pull", Received(READY))
    assert actions == [
        StartCopy(0, "draft", 7, 8, [5, 6], [3, 4]),
        StartCopy(1, "target", 2, 8, [1, 2], [8, 9]),
    ]
    assert d.handle(Received(READY)) == [] == d.handle(Received(Confirm(KEY, SEEDS))) == d.handle(Tick())
    assert d.handle(CopyEnded(0, ok=True, num_bytes=1, num_runs=1)) == []
    done = [Send(ReadDone(KEY))]
    assert d.handle(CopyEnded(1, ok=True, num_bytes=2, num_runs=3)) == done == d.handle(Tick())
    assert d.handle(Received(READY)) == done
    assert d.handle(Received(Confirm(KEY, SEEDS))) == [
        Send(Ack(KEY)),
        Notify(DecodeCommitted(KEY, SEEDS, 3, 4)),
    ]


def test_abort_in_push_waits_for_proof() -> None:
    d, _ = machine()
    cancel = [Send(Cancel(KEY, "gone"))]
    assert d.handle(Abort("gone")) == cancel == d.handle(Tick())
    for event in (Deadline(), Received(Cancel(KEY, "too")), PeerLost("peer_lost", "", fenced=False)):
        assert RELEASED not in d.handle(event)
    assert d.handle(Received(Cancelled(KEY, "gone"))) == [Send(Cancelled(KEY, "gone")), RELEASED]
    assert d.handle(Received(Cancelled(KEY, "gone"))) == []


@pytest.mark.parametrize("proof", [Received(COMMIT), Received(Finished(KEY, SEEDS)), PeerLost("x", "", True)])
def test_what_else_proves_that_p_writes_no_more(proof: Received | PeerLost) -> None:
    d, _ = machine("push", Deadline())
    assert d.handle(proof) == [Send(Cancelled(KEY, "handoff_timeout")), RELEASED]


def test_abort_in_pull_waits_for_own_reads() -> None:
    d, _ = machine("pull", Received(READY))
    assert d.handle(Abort("gone")) == [Send(Cancel(KEY, "gone")), CancelCopies((0, 1))]
    assert d.handle(CopyEnded(0, ok=False)) == []
    assert d.handle(Received(Cancelled(KEY, "gone"))) == [] == d.handle(PeerLost("x", "", True))
    assert d.handle(CopyEnded(1, ok=True)) == [Send(Cancelled(KEY, "gone")), RELEASED]
    assert d.handle(Received(Confirm(KEY, SEEDS))) == [Send(Cancelled(KEY, "gone"))]


def test_nothing_was_asked_for_so_everything_is_free() -> None:
    d = DecodeHandoff(KEY, "push", "t", WANTED, TABLES)
    assert d.handle(PeerLost("incompatible_peer", "model", fenced=False)) == [
        failed("incompatible_peer", "model"),
        RELEASED,
    ]
    # P may hold pages for it: it is told, once.
    assert d.handle(PeerReady()) == [Send(Cancel(KEY, "incompatible_peer", "model"))]
    assert d.handle(PeerReady()) == []


def test_nack_proves_nothing_about_memory() -> None:
    d, actions = machine("push", Received(Nack(KEY, "register_refused", "ticket")))
    assert actions == [
        failed("register_refused", "ticket"),
        Send(Cancel(KEY, "register_refused", "ticket")),
    ]
    assert d.handle(Received(Cancelled(KEY, "x")))[-1] == RELEASED


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_finished_ends_without_kv(mode: Literal["push", "pull"]) -> None:
    d, actions = machine(mode, Received(Finished(KEY, SEEDS)))
    assert actions == [Send(Ack(KEY)), Notify(DecodeFinished(KEY, SEEDS))]
    assert d.closed
    assert d.handle(Received(Finished(KEY, SEEDS))) == [Send(Ack(KEY))]


def test_cancel_from_p_fails_the_request_at_once_but_frees_only_when_quiet() -> None:
    d, actions = machine("push", Received(Cancel(KEY, "gone", "why")))
    assert actions == [failed("gone", "why")]
    assert d.handle(Received(Cancelled(KEY, "gone"))) == [Send(Cancelled(KEY, "gone")), RELEASED]
    _, actions = machine("pull", Received(Cancel(KEY, "gone", "why")))
    assert actions == [failed("gone", "why"), Send(Cancelled(KEY, "gone")), RELEASED]


def test_a_failed_read_ends_the_attempt() -> None:
    d, _ = machine("pull", Received(READY))
    assert d.handle(CopyEnded(0, ok=False, message="bad")) == [
        failed("transfer_failed", "bad"),
        Send(Cancel(KEY, "transfer_failed", "bad")),
        CancelCopies((1,)),
    ]
    assert d.handle(CopyEnded(1, ok=False))[-1] == RELEASED

"""D's state machine, event by event."""

from __future__ import annotations

from typing import Literal

import pytest

from baton.errors import ProtocolError
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.digests import seeds_digest
from baton.handoff.protocol.events import (
    FINAL_REASONS,
    Abort,
    Action,
    BadPiece,
    CancelCopies,
    CheckDigests,
    CopyEnded,
    Count,
    Deadline,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeProgress,
    DecodeReleased,
    DigestsChecked,
    Fault,
    Notify,
    PeerLost,
    PeerReady,
    Received,
    Send,
    StartCopy,
    Tick,
)
from baton.handoff.protocol.messages import (
    Ack,
    AttemptKey,
    Cancel,
    Cancelled,
    Commit,
    Confirm,
    Finished,
    Nack,
    PieceDigest,
    Progress,
    ReadDone,
    Ready,
    Register,
    Repair,
    Seeds,
)
from baton.kv.interval import Interval

KEY = AttemptKey(b"0" * 16, 0, "p", "d")
SEEDS = Seeds(7, None, [8])
WANTED = {"target": Interval(2, 8), "draft": Interval(7, 8)}
TABLES = {"draft": [3, 4], "target": [8, 9]}
COMMIT = Commit(KEY, final={"target": 8, "draft": 8}, seeds=SEEDS, num_bytes=50, num_runs=5)
READY = Ready(KEY, final={"target": 8, "draft": 8}, pages={"target": [1, 2], "draft": [5, 6]})
RELEASED = Notify(DecodeReleased(KEY))


def failed(reason: str, message: str = "") -> Notify:
    return Notify(DecodeFailed(KEY, reason, message, recoverable=reason not in FINAL_REASONS))


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
        StartCopy(0, "draft", Interval(7, 8), [5, 6], [3, 4]),
        StartCopy(1, "target", Interval(2, 8), [1, 2], [8, 9]),
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
def test_a_commit_an_end_or_a_dead_peer_proves_that_p_writes_no_more(proof: Received | PeerLost) -> None:
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
    # P may hold pages for it, so it is told once.
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


def test_a_failed_read_is_issued_again_within_bounds() -> None:
    d, _ = machine("pull", Received(READY))
    assert d.handle(CopyEnded(0, ok=False)) == [Count("retries"), StartCopy(2, "draft", Interval(7, 8), [5, 6], [3, 4])]
    assert d.handle(CopyEnded(0, ok=False)) == []
    assert d.handle(CopyEnded(1, ok=False)) == [
        Count("retries"),
        StartCopy(3, "target", Interval(2, 8), [1, 2], [8, 9]),
    ]
    assert d.handle(CopyEnded(2, ok=False)) == [Count("retries"), StartCopy(4, "draft", Interval(7, 8), [5, 6], [3, 4])]
    assert d.handle(CopyEnded(3, ok=True)) == []
    assert d.handle(CopyEnded(4, ok=False, message="bad")) == [
        failed("transfer_failed", "bad"),
        Send(Cancel(KEY, "transfer_failed", "bad")),
        Send(Cancelled(KEY, "transfer_failed")),
        RELEASED,
    ]


def test_a_failed_read_without_retries_ends_the_attempt() -> None:
    d = DecodeHandoff(KEY, "pull", "t", WANTED, TABLES, max_retries=0)
    d.handle(PeerReady())
    d.handle(Received(READY))
    assert d.handle(CopyEnded(0, ok=False, message="bad")) == [
        failed("transfer_failed", "bad"),
        Send(Cancel(KEY, "transfer_failed", "bad")),
        CancelCopies((1,)),
    ]
    assert d.handle(CopyEnded(1, ok=False))[-1] == RELEASED


# ---------------------------------------------------------------- digests

GOOD_SEEDS = seeds_digest(KEY, SEEDS)
T1, T2 = PieceDigest(Interval(2, 5), b"a" * 8), PieceDigest(Interval(5, 8), b"b" * 8)
D1 = PieceDigest(Interval(7, 8), b"c" * 8)
ALL = {"draft": [D1], "target": [T1, T2]}


def commit(round_: int = 0, seeds: bytes = GOOD_SEEDS, digests: dict[str, list[PieceDigest]] = ALL) -> Received:
    final = {"target": 8, "draft": 8}
    return Received(Commit(KEY, final=final, seeds=SEEDS, round=round_, digests=digests, seeds_digest=seeds))


def bad(group: str, piece: PieceDigest) -> BadPiece:
    return BadPiece(group, piece.tokens, ((0, "k"),))


def guarded(mode: Literal["push", "pull"] = "push", max_retries: int = 2) -> DecodeHandoff:
    d = DecodeHandoff(KEY, mode, "t", WANTED, TABLES, max_retries=max_retries, integrity="full")
    d.handle(PeerReady())
    return d


def test_commit_waits_until_every_digest_matched() -> None:
    d = guarded()
    assert d.handle(commit()) == [CheckDigests(0, ALL, TABLES)]
    assert d.handle(commit()) == [] == d.handle(Tick())
    assert d.handle(DigestsChecked(0)) == [
        Notify(DecodeProgress(KEY, {"draft": 8, "target": 8})),
        Send(Ack(KEY)),
        Notify(DecodeCommitted(KEY, SEEDS, 0, 0)),
    ]
    assert d.handle(DigestsChecked(0)) == []


def test_progress_proves_early_and_is_not_checked_twice() -> None:
    d = guarded()
    assert d.handle(Received(Progress(KEY, {"target": [T1]}))) == [CheckDigests(0, {"target": [T1]}, TABLES)]
    assert d.handle(DigestsChecked(0)) == [Notify(DecodeProgress(KEY, {"target": 5}))]
    assert d.handle(Received(Progress(KEY, {"target": [T1]}))) == []
    # Tokens after a gap are not proven.
    d.handle(Received(Progress(KEY, {"target": [T2]})))
    assert d.handle(DigestsChecked(1, (bad("target", T2),))) == []
    assert d.handle(commit()) == [CheckDigests(2, {"draft": [D1], "target": [T2]}, TABLES)]
    assert d.handle(DigestsChecked(2))[-1] == Notify(DecodeCommitted(KEY, SEEDS, 0, 0))


def test_a_late_check_of_progress_does_not_commit() -> None:
    d = guarded()
    d.handle(Received(Progress(KEY, {"target": [T1]})))
    # Pieces that are being checked are not checked again.
    rest = {"draft": [D1], "target": [T2]}
    assert d.handle(commit()) == [CheckDigests(1, rest, TABLES)]
    assert d.handle(DigestsChecked(0)) == [Notify(DecodeProgress(KEY, {"target": 5}))]
    assert d.handle(DigestsChecked(1))[-1] == Notify(DecodeCommitted(KEY, SEEDS, 0, 0))


def test_a_commit_waits_for_the_checks_of_progress() -> None:
    d = guarded()
    d.handle(Received(Progress(KEY, ALL)))
    assert d.handle(commit()) == [] == d.handle(commit())
    repair = Send(Repair(KEY, 1, {"target": [Interval(5, 8)]}))
    assert d.handle(DigestsChecked(0, (bad("target", T2),)))[-1] == repair
    # After a REPAIR other copies overwrite the pages: checks in progress prove nothing.
    assert d.handle(commit(1)) == [CheckDigests(1, {"target": [T2]}, TABLES)]
    assert d.handle(DigestsChecked(1))[-1] == Notify(DecodeCommitted(KEY, SEEDS, 0, 0))


def test_exactly_the_bad_pieces_are_asked_for_again() -> None:
    d = guarded()
    d.handle(commit())
    repair = Send(Repair(KEY, 1, {"target": [Interval(5, 8)]}))
    assert d.handle(DigestsChecked(0, (bad("target", T2),)))[1:] == [Count("bad_pieces", 1), Count("repairs"), repair]
    assert d.handle(Tick()) == [repair]
    # The COMMIT from before the repair, and its digests, prove nothing any more.
    assert d.handle(commit(0)) == [] == d.handle(Received(Progress(KEY, {"target": [T2]})))
    assert d.handle(commit(2)) == []
    assert d.handle(commit(1)) == [CheckDigests(1, {"target": [T2]}, TABLES)]
    assert d.handle(DigestsChecked(1))[-1] == Notify(DecodeCommitted(KEY, SEEDS, 0, 0))
    assert d.round == 1


def test_repairs_are_bounded() -> None:
    d = guarded(max_retries=1)
    d.handle(commit())
    d.handle(DigestsChecked(0, (bad("target", T2), bad("draft", D1))))
    d.handle(commit(1))
    actions = d.handle(DigestsChecked(1, (bad("draft", D1),)))
    text = "tokens draft [7, 8) do not match their digests"
    assert actions[1] == Count("bad_pieces", 1)
    # P has no copy outstanding after a COMMIT, so the pages are free at once.
    assert actions[2:] == [
        failed("integrity_failed", text),
        Send(Cancel(KEY, "integrity_failed", text)),
        Send(Cancelled(KEY, "integrity_failed")),
        RELEASED,
    ]


def test_a_commit_of_before_a_repair_proves_no_quiet() -> None:
    d = guarded()
    d.handle(commit())
    d.handle(DigestsChecked(0, (bad("target", T2),)))
    assert d.handle(Abort("gone")) == [Send(Cancel(KEY, "gone"))]
    assert RELEASED not in d.handle(commit(0))
    assert d.handle(commit(1)) == [Send(Cancelled(KEY, "gone")), RELEASED]


@pytest.mark.parametrize("digests", [{}, {"draft": [D1]}, {"draft": [D1], "target": [T1]}])
def test_missing_digests_are_no_commit(digests: dict[str, list[PieceDigest]]) -> None:
    d = guarded()
    actions = d.handle(commit(digests=digests))
    assert isinstance(actions[0], Notify)
    assert isinstance(actions[0].event, DecodeFailed)
    assert actions[0].event.reason == "incomplete_commit"
    assert "brings no digests" in actions[0].event.message
    assert actions[-1] == RELEASED


def test_digests_of_what_was_not_wanted_are_refused() -> None:
    d = guarded()
    beyond = {"target": [PieceDigest(Interval(5, 9), b"b" * 8)]}
    for message in (Received(Progress(KEY, beyond)), commit(digests=beyond)):
        with pytest.raises(ProtocolError, match="target"):
            d.handle(message)
    assert d.handle(commit()) == [CheckDigests(0, ALL, TABLES)]


@pytest.mark.parametrize("count", [256, 257])
def test_too_many_bad_pieces_are_not_repaired(count: int) -> None:
    """Only bad pieces are copied again: one REPAIR over the whole range would overwrite proven ones too."""
    n = 128 * count
    pieces = [PieceDigest(Interval(at, at + 64), b"x" * 8) for at in range(0, n, 64)]
    d = DecodeHandoff(KEY, "push", "t", {"target": Interval(0, n)}, {"target": [1]}, integrity="full")
    d.handle(PeerReady())
    d.handle(Received(Commit(KEY, {"target": n}, SEEDS, digests={"target": pieces}, seeds_digest=GOOD_SEEDS)))
    last = d.handle(DigestsChecked(0, tuple(bad("target", piece) for piece in pieces[::2])))[-1]
    if count == 256:
        assert last == Send(Repair(KEY, 1, {"target": [Interval(at, at + 64) for at in range(0, n, 128)]}))
    else:
        assert last == RELEASED


def test_bad_seeds_are_asked_for_again() -> None:
    d = guarded()
    d.handle(commit(seeds=b"x" * 8))
    assert d.handle(DigestsChecked(0))[-1] == Send(Repair(KEY, 1, {}))
    assert d.handle(commit(1))[-1] == Notify(DecodeCommitted(KEY, SEEDS, 0, 0))
    d = guarded("pull", max_retries=1)
    d.handle(Received(Ready(KEY, final={"target": 8, "draft": 8}, pages=TABLES, digests=ALL)))
    d.handle(CopyEnded(0, ok=True))
    d.handle(CopyEnded(1, ok=True))
    d.handle(DigestsChecked(0))
    assert d.handle(Received(Confirm(KEY, SEEDS))) == [Count("repairs"), Send(ReadDone(KEY))]
    assert d.handle(Received(Confirm(KEY, SEEDS)))[0] == failed(
        "integrity_failed", "the seeds do not match their digest"
    )


def test_pull_reads_bad_pieces_again_before_it_says_done() -> None:
    d = guarded("pull", max_retries=1)
    ready = Ready(KEY, final={"target": 8, "draft": 8}, pages={"target": [1, 2], "draft": [5, 6]}, digests=ALL)
    d.handle(Received(ready))
    d.handle(CopyEnded(0, ok=True))
    assert d.handle(CopyEnded(1, ok=True)) == [CheckDigests(0, ALL, TABLES)]
    actions = d.handle(DigestsChecked(0, (bad("target", T1),)))
    assert actions[-1] == StartCopy(2, "target", Interval(2, 5), [1, 2], [8, 9])
    assert d.handle(CopyEnded(2, ok=True)) == [CheckDigests(1, {"target": [T1]}, TABLES)]
    assert d.handle(DigestsChecked(1))[-1] == Send(ReadDone(KEY))
    confirm = Received(Confirm(KEY, SEEDS, GOOD_SEEDS))
    assert d.handle(confirm)[-1] == Notify(DecodeCommitted(KEY, SEEDS, 0, 0))


def test_a_fault_is_reported_to_the_engine() -> None:
    d, actions = machine("push", Fault("message_too_large", "x"))
    assert actions[0] == failed("message_too_large", "x")
    assert not d.closed


@pytest.mark.parametrize("reason", ["not_final", "register_refused", "superseded"])
def test_failures_that_computing_anew_would_not_help(reason: str) -> None:
    _, actions = machine("push", Received(Cancel(KEY, reason)))
    assert actions[0] == Notify(DecodeFailed(KEY, reason, "", recoverable=False))
    _, actions = machine("push", PeerLost("peer_lost", "", fenced=True))
    assert actions[0] == Notify(DecodeFailed(KEY, "peer_lost", "", recoverable=True))

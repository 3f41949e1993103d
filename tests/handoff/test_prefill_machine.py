"""P's state machine, event by event."""

from __future__ import annotations

from typing import Literal

import pytest

from baton.errors import ProtocolError
from baton.handoff.events import (
    Abort,
    Action,
    CancelCopies,
    CopyEnded,
    Deadline,
    Declared,
    Notify,
    Opened,
    PeerLost,
    PrefillReleased,
    Received,
    Sampled,
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
    ReadDone,
    Ready,
    Register,
    Seeds,
)
from baton.handoff.prefill import PrefillHandoff

KEY = AttemptKey(b"0" * 16, 0, "p", "d")
SEEDS = Seeds(7, None, [8])
TABLES = {"draft": [5, 6], "target": [1, 2]}
DEST = {"draft": [3, 4], "target": [8, 9]}
REGISTER = Received(Register(KEY, ticket="t", wanted={"target": (2, 8), "draft": (0, 8)}, pages=DEST))
ALL = Declared(8, TABLES, {"target": 8, "draft": 7})


def machine(mode: Literal["push", "pull"] = "push", *events: object) -> tuple[PrefillHandoff, list[Action]]:
    made = PrefillHandoff(KEY, mode, ["target", "draft"])
    actions: list[Action] = []
    for event in (Opened(), *events):
        actions = made.handle(event)  # type: ignore[arg-type]
    return made, actions


def released(outcome: str) -> Notify:
    return Notify(PrefillReleased(KEY, outcome))


def intervals(actions: list[Action]) -> list[tuple[str, int, int]]:
    return [(a.group, a.start, a.stop) for a in actions if isinstance(a, StartCopy)]


def test_push_copies_each_final_stretch_once_and_commits_after_the_last() -> None:
    p, actions = machine("push", REGISTER)
    assert actions == []
    assert intervals(p.handle(Declared(8, TABLES, {"target": 4, "draft": 3}))) == [
        ("draft", 0, 3),
        ("target", 2, 4),
    ]
    first = p.handle(ALL)
    assert intervals(first) == [("draft", 3, 7), ("target", 4, 8)]
    assert isinstance(first[0], StartCopy)
    assert (first[0].source_pages, first[0].dest_pages) == (
        [5, 6],
        [3, 4],
    )
    assert p.handle(ALL) == []
    for copy_id in range(4):
        assert p.handle(CopyEnded(copy_id, ok=True, num_bytes=10, num_runs=1)) == []
    assert intervals(p.handle(Sampled(SEEDS, False))) == [("draft", 7, 8)]
    commit = Commit(KEY, final={"target": 8, "draft": 8}, seeds=SEEDS, num_bytes=50, num_runs=5)
    last = CopyEnded(4, ok=True, num_bytes=10, num_runs=1)
    assert p.handle(last) == [Send(commit)]
    assert p.handle(last) == []
    assert p.handle(Tick()) == [Send(commit)] == p.handle(REGISTER)
    assert p.handle(Received(Ack(KEY))) == [released("committed")]
    assert p.closed
    assert p.handle(Received(Ack(KEY))) == [] == p.handle(Tick()) == p.handle(Deadline())


@pytest.mark.parametrize("order", ["before", "after"])
def test_register_may_come_before_the_engine_opens_or_after_it_is_done(order: str) -> None:
    p = PrefillHandoff(KEY, "push", ["target", "draft"])
    rest = [Opened(), ALL, Sampled(SEEDS, False)]
    events = [REGISTER, *rest] if order == "before" else [*rest, REGISTER]
    copies = [interval for event in events for interval in intervals(p.handle(event))]
    assert sorted(copies)[0][:2] == ("draft", 0)
    assert max(stop for _, _, stop in copies) == 8
    assert not p.closed
    assert not p.released


def test_pull_offers_once_prefilled_and_confirms_only_what_was_offered() -> None:
    p, actions = machine("pull", REGISTER, ALL)
    assert actions == [] == p.handle(Received(ReadDone(KEY))) == p.handle(Received(Ack(KEY)))
    ready = Ready(KEY, final={"target": 8, "draft": 8}, pages=TABLES)
    assert p.handle(Sampled(SEEDS, False)) == [Send(ready)] == p.handle(Tick())
    assert p.handle(Received(Ack(KEY))) == []
    confirm = [Send(Confirm(KEY, SEEDS))]
    assert p.handle(Received(ReadDone(KEY))) == confirm == p.handle(Received(ReadDone(KEY))) == p.handle(Tick())
    assert p.handle(Received(Ack(KEY))) == [released("committed")]


def test_abort_in_push_waits_for_its_own_copies_only() -> None:
    p, _ = machine("push", REGISTER, ALL)
    assert p.handle(Abort("gone", "why")) == [Send(Cancel(KEY, "gone", "why")), CancelCopies((0, 1))]
    assert p.handle(CopyEnded(1, ok=False)) == [] == p.handle(Tick())
    assert p.handle(Received(Cancelled(KEY, "gone"))) == []
    assert p.handle(CopyEnded(0, ok=True)) == [Send(Cancelled(KEY, "gone")), released("gone")]
    assert p.handle(REGISTER) == [Send(Cancelled(KEY, "gone"))] == p.handle(Received(Cancel(KEY, "x")))


@pytest.mark.parametrize("proof", ["cancelled", "fence", "ack"])
def test_deadline_in_pull_frees_nothing_before_the_reader_is_quiet(proof: str) -> None:
    p, _ = machine("pull", REGISTER, ALL, Sampled(SEEDS, False), Received(ReadDone(KEY)))
    assert p.handle(Deadline())[0] == Send(
        Cancel(KEY, "handoff_timeout", "the handoff did not end before its ticket expired")
    )
    for event in (Deadline(), Abort("again"), PeerLost("peer_lost", "", fenced=False)):
        assert p.handle(event) == []
    assert p.handle(Tick()) == [Send(Cancel(KEY, "handoff_timeout"))]
    assert p.handle(Received(Cancel(KEY, "x"))) == [Send(Cancelled(KEY, "handoff_timeout"))]
    assert not p.released
    events = {
        "cancelled": Received(Cancelled(KEY, "x")),
        "fence": PeerLost("peer_lost", "", fenced=True),
        "ack": Received(Ack(KEY)),
    }
    assert p.handle(events[proof]) == [Send(Cancelled(KEY, "handoff_timeout")), released("handoff_timeout")]
    assert p.closed


def test_pull_frees_at_once_what_was_never_offered() -> None:
    p, _ = machine("pull", REGISTER, ALL)
    assert p.handle(Abort("gone"))[-1] == released("gone")


def test_a_cancel_leaves_a_tombstone_that_starts_nothing() -> None:
    p = PrefillHandoff(KEY, "push", ["target", "draft"])
    assert p.handle(Received(Cancel(KEY, "gone"))) == [Send(Cancelled(KEY, "gone"))]
    assert p.closed
    assert p.handle(REGISTER) == [Send(Cancelled(KEY, "gone"))]
    assert p.handle(Opened()) == [released("gone")]
    assert p.handle(ALL) == [] == p.handle(Sampled(SEEDS, False))


def test_finished_frees_p_at_once_and_tells_d_when_it_comes() -> None:
    p, actions = machine("push", ALL, Sampled(SEEDS, True))
    assert actions == [released("finished")]
    finished = [Send(Finished(KEY, SEEDS))]
    assert p.handle(REGISTER) == finished == p.handle(Tick())
    assert p.handle(Received(Ack(KEY))) == []
    assert p.closed


def test_finished_waits_for_copies_under_way() -> None:
    p, _ = machine("push", REGISTER, ALL)
    assert p.handle(Sampled(SEEDS, True)) == [CancelCopies((0, 1))]
    assert p.handle(CopyEnded(0, ok=False)) == []
    assert p.handle(CopyEnded(1, ok=True)) == [released("finished"), Send(Finished(KEY, SEEDS))]


def test_a_failed_copy_ends_the_attempt() -> None:
    p, _ = machine("push", REGISTER, ALL)
    assert p.handle(CopyEnded(0, ok=False, message="disk")) == [
        Send(Cancel(KEY, "transfer_failed", "disk")),
        CancelCopies((1,)),
    ]
    assert p.handle(CopyEnded(1, ok=False))[-1] == released("transfer_failed")


def test_what_is_never_final_cannot_be_wanted() -> None:
    far = Received(Register(KEY, ticket="t", wanted={"target": (0, 9), "draft": (0, 8)}, pages=DEST))
    _, actions = machine("pull", far, ALL, Sampled(SEEDS, False))
    assert actions[-1] == released("not_final")


def test_a_register_of_other_groups_is_refused_and_changes_nothing() -> None:
    p, _ = machine()
    for wanted, pages in (({"target": (0, 8)}, DEST), ({"target": (0, 8), "draft": (0, 8)}, {"target": [1]})):
        with pytest.raises(ProtocolError):
            p.handle(Received(Register(KEY, ticket="t", wanted=wanted, pages=pages)))
    assert not p.registered
    assert p.handle(REGISTER) == []

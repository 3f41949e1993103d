"""P's state machine, event by event."""

from __future__ import annotations

from typing import Literal

import pytest

from baton.errors import ProtocolError
from baton.handoff.protocol.digests import seeds_digest
from baton.handoff.protocol.events import (
    Abort,
    Action,
    CancelCopies,
    ComputeDigests,
    CopyEnded,
    Count,
    Deadline,
    Declared,
    DigestsComputed,
    LayersWithdrawn,
    LayersWritten,
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
from baton.handoff.protocol.messages import (
    Ack,
    AttemptKey,
    Cancel,
    Cancelled,
    Commit,
    Confirm,
    Finished,
    PieceDigest,
    Progress,
    ReadDone,
    Ready,
    Register,
    Repair,
    Seeds,
)
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.kv.interval import ALL_LAYERS, Interval

KEY = AttemptKey(b"0" * 16, 0, "p", "d")
SEEDS = Seeds(7, None, [8])
TABLES = {"draft": [5, 6], "target": [1, 2]}
DEST = {"draft": [3, 4], "target": [8, 9]}
REGISTER = Received(Register(KEY, ticket="t", wanted={"target": Interval(2, 8), "draft": Interval(0, 8)}, pages=DEST))
# Final with the seeds.
WHOLE = {"target": 8, "draft": 8}
ALL = Declared(8, TABLES, {"target": 8, "draft": 7})


def machine(mode: Literal["push", "pull"] = "push", *events: object) -> tuple[PrefillHandoff, list[Action]]:
    made = PrefillHandoff(KEY, mode, "t", ["target", "draft"])
    actions: list[Action] = []
    for event in (Opened(), *events):
        actions = made.handle(event)  # type: ignore[arg-type]
    return made, actions


def released(outcome: str) -> Notify:
    return Notify(PrefillReleased(KEY, outcome))


def intervals(actions: list[Action]) -> list[tuple[str, int, int]]:
    return [(a.group, a.tokens.start, a.tokens.stop) for a in actions if isinstance(a, StartCopy)]


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
    assert intervals(p.handle(Sampled(SEEDS, False, WHOLE))) == [("draft", 7, 8)]
    commit = Commit(KEY, final={"target": 8, "draft": 8}, seeds=SEEDS, num_bytes=50, num_runs=5)
    last = CopyEnded(4, ok=True, num_bytes=10, num_runs=1)
    assert p.handle(last) == [Send(commit)]
    assert p.handle(last) == []
    assert p.handle(Tick()) == [Send(commit)] == p.handle(REGISTER)
    assert p.handle(Received(Ack(KEY))) == [released("committed")]
    assert p.closed
    assert p.handle(Received(Ack(KEY))) == [] == p.handle(Tick()) == p.handle(Deadline())


def in_layers(actions: list[Action]) -> list[tuple[str, int, int, int, int]]:
    return [
        (a.group, a.tokens.start, a.tokens.stop, a.layers.start, a.layers.stop)
        for a in actions
        if isinstance(a, StartCopy)
    ]


END = ALL_LAYERS.stop
PART = {"target": 6}


def test_layers_are_copied_once_each_as_they_are_written() -> None:
    p, _ = machine("push", REGISTER)
    assert in_layers(p.handle(LayersWritten(8, TABLES, PART, 2))) == [("target", 2, 6, 0, 2)]
    assert p.handle(LayersWritten(8, TABLES, PART, 2)) == []
    assert in_layers(p.handle(LayersWritten(8, TABLES, PART, 5))) == [("target", 2, 6, 2, 5)]
    assert in_layers(p.handle(Declared(8, TABLES, {"target": 6, "draft": 0}))) == [("target", 2, 6, 5, END)]
    assert p.handle(LayersWritten(8, TABLES, PART, 7)) == []  # reported late: already final in all layers
    assert in_layers(p.handle(LayersWritten(8, TABLES, {"target": 8}, 1))) == [("target", 6, 8, 0, 1)]
    p.handle(CopyEnded(0, ok=True, num_bytes=10))
    p.handle(CopyEnded(3, ok=True, num_bytes=10))
    assert in_layers(p.handle(ALL)) == [("draft", 0, 7, 0, END), ("target", 6, 8, 1, END)]
    failed = p.handle(CopyEnded(1, ok=False))
    assert in_layers(failed) == [("target", 2, 6, 2, 5)]
    for copy_id in (2, 4, 5, 6):
        p.handle(CopyEnded(copy_id, ok=True, num_bytes=10))
    (last,) = p.handle(Sampled(SEEDS, False, WHOLE))
    assert isinstance(last, StartCopy)
    (commit,) = p.handle(CopyEnded(last.copy_id, ok=True, num_bytes=10))
    assert isinstance(commit, Send)
    assert isinstance(commit.message, Commit)
    # Copies that ended before the whole prompt was computed.
    assert (p.copies.num_hidden, p.copies.num_bytes) == (20, 70)


FIRST_ROWS = [REGISTER, LayersWritten(8, TABLES, {"target": 4}, 3), LayersWritten(8, TABLES, {"target": 5}, 3)]
LAST_ROWS = LayersWritten(8, TABLES, PART, 2)


def test_rows_are_copied_in_all_layers_while_later_rows_are_computed() -> None:
    """Then the last rows layer by layer, and what is left of all of them in one copy."""
    p, actions = machine("push", *FIRST_ROWS)
    assert in_layers(actions) == [("target", 4, 5, 0, 3)]
    assert in_layers(p.handle(LAST_ROWS)) == [("target", 5, 6, 0, 2)]
    assert p.handle(LAST_ROWS) == []
    assert in_layers(p.handle(LayersWritten(8, TABLES, PART, 3))) == [("target", 5, 6, 2, 3)]
    assert in_layers(p.handle(Declared(8, TABLES, PART))) == [("target", 2, 6, 3, END)]


def test_rows_that_were_not_reported_are_copied_once_the_forward_has_ended() -> None:
    p, _ = machine("push", *FIRST_ROWS, LAST_ROWS)
    assert in_layers(p.handle(Declared(8, TABLES, {"target": 8}))) == [
        ("target", 2, 5, 3, END),
        ("target", 5, 6, 2, END),
        ("target", 6, 8, 0, END),
    ]


@pytest.mark.parametrize("other", [LayersWithdrawn(), LayersWritten(8, TABLES, {"target": 3}, 3)])
def test_rows_of_another_forward_are_copied_after_the_first_copies(other: LayersWithdrawn | LayersWritten) -> None:
    """Also where a forward ends within rows that were reported."""
    p, _ = machine("push", *FIRST_ROWS, LAST_ROWS, other, Declared(8, TABLES, PART))
    assert p.handle(CopyEnded(0, ok=True)) == p.handle(CopyEnded(1, ok=True)) == []
    assert in_layers(p.handle(CopyEnded(2, ok=True))) == [("target", 2, 6, 0, END)]


def test_layers_of_a_forward_that_failed_are_copied_again_after_the_first_copies() -> None:
    """Otherwise a late copy of the failed forward would overwrite a later one."""
    p, _ = machine("push", REGISTER)
    p.handle(LayersWritten(8, TABLES, PART, 2))
    assert p.handle(LayersWithdrawn()) == []
    assert p.handle(LayersWritten(8, TABLES, PART, 3)) == []
    assert p.handle(Declared(8, TABLES, PART)) == []
    assert in_layers(p.handle(CopyEnded(0, ok=True))) == [("target", 2, 6, 0, END)]
    assert p.handle(LayersWithdrawn()) == []
    # No layers were copied before D had pages for them.
    q, _ = machine("push", LayersWritten(8, TABLES, PART, 2), LayersWithdrawn(), Declared(8, TABLES, PART))
    assert in_layers(q.handle(REGISTER)) == [("target", 2, 6, 0, END)]


def test_a_prompt_whose_prefix_is_final_in_other_tokens_is_copied_whole() -> None:
    """If an engine continues differently from what it declared, its last declaration counts."""
    p, _ = machine("push", REGISTER)
    p.handle(LayersWritten(8, TABLES, PART, 2))
    assert p.handle(Declared(8, TABLES, {"target": 5})) == []
    assert in_layers(p.handle(CopyEnded(0, ok=True))) == [("target", 2, 5, 0, END)]


def test_d_is_told_of_a_stretch_when_all_its_layers_have_come() -> None:
    p = PrefillHandoff(KEY, "push", "t", ["target", "draft"], integrity="full")
    for event in (Opened(), REGISTER, LayersWritten(8, TABLES, PART, 2)):
        p.handle(event)
    assert p.handle(CopyEnded(0, ok=True)) == []
    assert [type(a) for a in p.handle(Declared(8, TABLES, PART))] == [StartCopy, ComputeDigests]
    pieces = [PieceDigest(Interval(2, 6), b"x")]
    assert p.handle(DigestsComputed("target", pieces)) == []
    assert p.handle(CopyEnded(1, ok=True)) == [Send(Progress(KEY, {"target": pieces}))]


def test_pull_reads_when_all_is_final_whatever_was_said_of_layers() -> None:
    p, actions = machine("pull", REGISTER, LayersWritten(8, TABLES, PART, 2))
    assert actions == []
    assert p.handle(LayersWithdrawn()) == []


@pytest.mark.parametrize("order", ["before", "after"])
def test_register_may_come_before_the_engine_opens_or_after_it_is_done(order: str) -> None:
    p = PrefillHandoff(KEY, "push", "t", ["target", "draft"])
    rest = [Opened(), ALL, Sampled(SEEDS, False, WHOLE)]
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
    assert p.handle(Sampled(SEEDS, False, WHOLE)) == [Send(ready)] == p.handle(Tick())
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
    p, _ = machine("pull", REGISTER, ALL, Sampled(SEEDS, False, WHOLE), Received(ReadDone(KEY)))
    assert not p.closing
    assert p.handle(Deadline())[0] == Send(Cancel(KEY, "handoff_timeout", "the handoff did not end in time"))
    for event in (Deadline(), Abort("again"), PeerLost("peer_lost", "", fenced=False)):
        assert p.handle(event) == []
    assert p.handle(Tick()) == [Send(Cancel(KEY, "handoff_timeout"))]
    assert p.handle(Received(Cancel(KEY, "x"))) == [Send(Cancelled(KEY, "handoff_timeout"))]
    assert p.closing
    assert not p.released
    events = {
        "cancelled": Received(Cancelled(KEY, "x")),
        "fence": PeerLost("peer_lost", "", fenced=True),
        "ack": Received(Ack(KEY)),
    }
    assert p.handle(events[proof]) == [Send(Cancelled(KEY, "handoff_timeout")), released("handoff_timeout")]
    assert p.closed
    assert not p.closing


def test_pull_frees_at_once_what_was_never_offered() -> None:
    p, _ = machine("pull", REGISTER, ALL)
    assert p.handle(Abort("gone"))[-1] == released("gone")


def test_a_cancel_leaves_a_tombstone_that_starts_nothing() -> None:
    p = PrefillHandoff(KEY, "push", "t", ["target", "draft"])
    assert p.handle(Received(Cancel(KEY, "gone"))) == [Send(Cancelled(KEY, "gone"))]
    assert p.closed
    assert p.handle(REGISTER) == [Send(Cancelled(KEY, "gone"))]
    assert p.handle(Opened()) == [released("gone")]
    assert p.handle(ALL) == [] == p.handle(Sampled(SEEDS, False, WHOLE))


def test_finished_frees_p_at_once_and_tells_d_when_it_comes() -> None:
    p, actions = machine("push", ALL, Sampled(SEEDS, True, {}))
    assert actions == [released("finished")]
    finished = [Send(Finished(KEY, SEEDS))]
    assert p.handle(REGISTER) == finished == p.handle(Tick())
    assert p.handle(Received(Ack(KEY))) == []
    assert p.closed


def test_finished_waits_for_copies_under_way() -> None:
    p, _ = machine("push", REGISTER, ALL)
    assert p.handle(Sampled(SEEDS, True, {})) == [CancelCopies((0, 1))]
    assert p.handle(CopyEnded(0, ok=False)) == []
    assert p.handle(CopyEnded(1, ok=True)) == [released("finished"), Send(Finished(KEY, SEEDS))]


def test_a_failed_copy_is_issued_again_within_bounds() -> None:
    p, _ = machine("push", REGISTER, ALL)
    assert p.handle(CopyEnded(1, ok=False)) == [
        Count("retries"),
        StartCopy(2, "target", Interval(2, 8), [1, 2], [8, 9]),
    ]
    assert p.handle(CopyEnded(1, ok=False)) == []
    assert p.handle(CopyEnded(0, ok=True)) == []
    assert p.handle(CopyEnded(2, ok=False)) == [
        Count("retries"),
        StartCopy(3, "target", Interval(2, 8), [1, 2], [8, 9]),
    ]
    # COMMIT waits for the copy that replaced the failed one.
    assert p.handle(Sampled(SEEDS, False, WHOLE)) == [StartCopy(4, "draft", Interval(7, 8), [5, 6], [3, 4])]
    assert p.handle(CopyEnded(4, ok=True)) == []
    assert isinstance(p.handle(CopyEnded(3, ok=True))[0], Send)
    p, _ = machine("push", REGISTER, ALL)
    for copy_id in (0, 2, 3):
        assert p.handle(CopyEnded(copy_id, ok=False))[0] == Count("retries")
    assert p.handle(CopyEnded(4, ok=False, message="disk"))[0] == Send(Cancel(KEY, "transfer_failed", "disk"))


def test_a_failed_copy_without_retries_ends_the_attempt() -> None:
    p = PrefillHandoff(KEY, "push", "t", ["target", "draft"], max_retries=0)
    for event in (Opened(), REGISTER, ALL):
        p.handle(event)
    assert p.handle(CopyEnded(0, ok=False, message="disk")) == [
        Send(Cancel(KEY, "transfer_failed", "disk")),
        CancelCopies((1,)),
    ]
    assert p.handle(CopyEnded(1, ok=False))[-1] == released("transfer_failed")


def test_wanted_entries_that_never_become_final_fail_the_handoff() -> None:
    far = Received(Register(KEY, ticket="t", wanted={"target": Interval(0, 9), "draft": Interval(0, 8)}, pages=DEST))
    _, actions = machine("pull", far, ALL, Sampled(SEEDS, False, WHOLE))
    assert actions[-1] == released("not_final")


def test_a_register_of_other_groups_is_refused_and_changes_nothing() -> None:
    p, _ = machine()
    for wanted, pages in (
        ({"target": Interval(0, 8)}, DEST),
        ({"target": Interval(0, 8), "draft": Interval(0, 8)}, {"target": [1]}),
    ):
        with pytest.raises(ProtocolError):
            p.handle(Received(Register(KEY, ticket="t", wanted=wanted, pages=pages)))
    assert not p.registered
    assert p.handle(REGISTER) == []


# ---------------------------------------------------------------- repair and digests


def committed(max_retries: int = 2) -> PrefillHandoff:
    """A P whose copies have ended and whose COMMIT was sent."""
    p = PrefillHandoff(KEY, "push", "t", ["target", "draft"], max_retries)
    for event in (Opened(), REGISTER, ALL, Sampled(SEEDS, False, WHOLE)):
        p.handle(event)
    for copy_id in range(3):
        p.handle(CopyEnded(copy_id, ok=True))
    return p


def commit(round_: int) -> Send:
    final = {"target": 8, "draft": 8}
    return Send(Commit(KEY, final=final, seeds=SEEDS, round=round_))


def repair(round_: int, **bad: list[tuple[int, int]]) -> Received:
    return Received(
        Repair(KEY, round_, {group: [Interval(*tokens) for tokens in found] for group, found in bad.items()})
    )


def test_repair_copies_exactly_what_was_bad_and_commits_the_next_round() -> None:
    p = committed()
    assert p.handle(Tick()) == [commit(0)]
    actions = p.handle(repair(1, target=[(2, 3), (5, 8)], draft=[(0, 1)]))
    assert actions[0] == Count("repairs")
    assert intervals(actions) == [("draft", 0, 1), ("target", 2, 3), ("target", 5, 8)]
    # A duplicate of the REPAIR and an ACK of the earlier COMMIT have no effect.
    assert p.handle(repair(1, target=[(2, 3)])) == [] == p.handle(Received(Ack(KEY))) == p.handle(Tick())
    assert p.handle(CopyEnded(3, ok=True)) == []
    assert p.handle(CopyEnded(4, ok=False))[0] == Count("retries")
    assert p.handle(CopyEnded(5, ok=True)) == []
    assert p.handle(CopyEnded(6, ok=True)) == [commit(1)]
    assert p.handle(repair(1, target=[(2, 3)])) == [commit(1)]
    assert p.handle(Received(Ack(KEY))) == [released("committed")]


def test_repair_of_the_seeds_alone_needs_no_copy() -> None:
    assert committed().handle(repair(1)) == [Count("repairs"), commit(1)]


@pytest.mark.parametrize(
    "bad",
    [{"target": [(2, 4), (3, 5)]}, {"target": [(1, 3)]}, {"target": [(7, 9)]}, {"target": [(3, 3)]}, {"x": [(0, 1)]}],
)
def test_repair_of_what_was_not_wanted_is_refused(bad: dict[str, list[tuple[int, int]]]) -> None:
    p = committed()
    with pytest.raises(ProtocolError):
        p.handle(repair(1, **bad))
    with pytest.raises(ProtocolError):
        p.handle(repair(2, target=[(2, 3)]))
    assert p.handle(Tick()) == [commit(0)]


def test_repair_after_the_end_starts_nothing() -> None:
    p = committed()
    assert p.handle(Received(Cancel(KEY, "gone")))[-1] == released("gone")
    assert p.handle(repair(1, target=[(2, 3)])) == [Send(Cancelled(KEY, "gone"))]
    p, _ = machine("push", REGISTER, ALL)
    assert p.handle(repair(1, target=[(2, 3)])) == []
    p = committed()
    p.handle(repair(1, target=[(2, 3)]))
    assert p.handle(Received(Cancel(KEY, "gone"))) == [CancelCopies((3,))]
    assert p.handle(CopyEnded(3, ok=False)) == [Send(Cancelled(KEY, "gone")), released("gone")]


def test_repairs_are_bounded() -> None:
    p = committed(max_retries=1)
    assert p.handle(repair(1))[-1] == commit(1)
    assert p.handle(repair(2))[-1] == released("integrity_failed")


def guarded(mode: Literal["push", "pull"]) -> PrefillHandoff:
    p = PrefillHandoff(KEY, mode, "t", ["target", "draft"], integrity="full")
    for event in (Opened(), REGISTER):
        p.handle(event)
    return p


DRAFT, TARGET = PieceDigest(Interval(0, 7), b"d" * 8), PieceDigest(Interval(2, 8), b"t" * 8)
LAST = PieceDigest(Interval(7, 8), b"e" * 8)


def test_push_tells_digests_with_each_copy_and_commits_when_all_are_known() -> None:
    p = guarded("push")
    assert p.handle(ALL) == [
        StartCopy(0, "draft", Interval(0, 7), [5, 6], [3, 4]),
        ComputeDigests("draft", (Interval(0, 7),), [5, 6]),
        StartCopy(1, "target", Interval(2, 8), [1, 2], [8, 9]),
        ComputeDigests("target", (Interval(2, 8),), [1, 2]),
    ]
    p.handle(DigestsComputed("draft", [DRAFT]))
    assert p.handle(CopyEnded(0, ok=True)) == [Send(Progress(KEY, {"draft": [DRAFT]}))]
    assert p.handle(CopyEnded(1, ok=True)) == []
    p.handle(Sampled(SEEDS, False, WHOLE))
    p.handle(DigestsComputed("draft", [LAST]))
    assert p.handle(CopyEnded(2, ok=True)) == [Send(Progress(KEY, {"draft": [LAST]}))]
    (sent,) = p.handle(DigestsComputed("target", [TARGET]))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Commit)
    assert sent.message.digests == {"draft": [DRAFT, LAST], "target": [TARGET]}
    assert sent.message.seeds_digest == seeds_digest(KEY, SEEDS)


def test_push_tells_digests_that_come_after_their_copy() -> None:
    p = guarded("push")
    p.handle(ALL)
    assert p.handle(CopyEnded(0, ok=True)) == []
    assert p.handle(DigestsComputed("draft", [DRAFT])) == [Send(Progress(KEY, {"draft": [DRAFT]}))]
    p.handle(Abort("client", ""))
    assert p.handle(DigestsComputed("target", [TARGET])) == []


def test_pull_is_ready_when_all_digests_are_known() -> None:
    p = guarded("pull")
    p.handle(ALL)
    p.handle(DigestsComputed("draft", [DRAFT]))
    assert p.handle(Sampled(SEEDS, False, WHOLE)) == [ComputeDigests("draft", (Interval(7, 8),), [5, 6])]
    assert p.handle(DigestsComputed("target", [TARGET])) == []
    (sent,) = p.handle(DigestsComputed("draft", [LAST]))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Ready)
    assert sent.message.digests == {"draft": [DRAFT, LAST], "target": [TARGET]}
    assert p.handle(Received(ReadDone(KEY))) == [Send(Confirm(KEY, SEEDS, seeds_digest(KEY, SEEDS)))]

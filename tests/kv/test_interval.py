"""Final and wanted entries: the rows of the table, and edge cases."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest

from baton.errors import ProtocolError
from baton.kv.interval import Interval, Rules


def test_interval_arithmetic() -> None:
    a = Interval(3, 9)
    assert (len(a), a.empty, Interval(4, 4).empty) == (6, False, True)
    assert a.covers(Interval(3, 9))
    assert a.covers(Interval(50, 50))
    assert not a.covers(Interval(3, 10))
    assert (a.after(5), a.after(0), a.after(99)) == (Interval(5, 9), a, Interval(9, 9))
    assert (a.round_out(4), Interval(5, 5).round_out(4)) == (Interval(0, 12), Interval(5, 5))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3)])
def test_bad_intervals_are_refused_from_the_wire_too(start: int, stop: int) -> None:
    with pytest.raises(ProtocolError, match="not an interval"):
        Interval(start, stop)
    with pytest.raises(ProtocolError, match="not an interval"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([start, stop]), type=Interval)


@pytest.mark.parametrize(
    ("kind", "window", "n", "hit", "options", "want"),
    [
        ("full", None, 20, 0, {}, (0, 20)),
        ("full", None, 20, 7, {}, (7, 20)),
        ("mla", None, 20, 20, {}, (20, 20)),
        ("sliding_window", 8, 20, 0, {}, (13, 20)),
        ("sliding_window", 8, 20, 15, {}, (15, 20)),
        ("sliding_window", 8, 5, 0, {}, (0, 5)),
        ("sliding_window", 1, 20, 0, {}, (20, 20)),
        ("state", None, 20, 0, {}, (0, 1)),
        ("state", None, 20, 19, {}, (0, 1)),
        ("state", None, 20, 20, {}, (1, 1)),
        # The drafter's last entry moves with the seeds, however long the hit.
        ("full", None, 20, 0, {"module": 1}, (0, 20)),
        ("full", None, 20, 19, {"module": 1}, (19, 20)),
        ("full", None, 20, 20, {"module": 1}, (19, 20)),
        ("full", None, 1, 1, {"module": 1}, (0, 1)),
        ("sliding_window", 8, 20, 0, {"module": 1}, (13, 20)),
        ("sliding_window", 1, 20, 0, {"module": 1}, (19, 20)),
        # Module j of k: [h', n - j + 1).
        ("full", None, 20, 0, {"module": 3}, (0, 18)),
        ("full", None, 20, 20, {"module": 3}, (17, 18)),
        ("full", None, 2, 0, {"module": 3}, (0, 0)),
        # A drafter that reads tokens only moves as the target does.
        ("full", None, 20, 7, {"module": None}, (7, 20)),
        ("full", None, 20, 20, {"module": None}, (20, 20)),
        ("sliding_window", 8, 20, 0, {"module": None}, (13, 20)),
        # Complete entries of four tokens.
        ("compressed", None, 22, 0, {"rate": 4}, (0, 20)),
        ("compressed", None, 22, 8, {"rate": 4}, (8, 20)),
        ("compressed", None, 20, 20, {"rate": 4}, (20, 20)),
        ("compressed", None, 3, 0, {"rate": 4}, (0, 0)),
    ],
)
def test_wanted_entries_of_each_kind_of_group(
    kind: Any, window: int | None, n: int, hit: int, options: dict[str, Any], want: tuple[int, int]
) -> None:
    assert Rules(kind, window=window, **options).wanted(n, hit) == Interval(*want)


@pytest.mark.parametrize(
    ("kind", "n", "computed", "options", "final"),
    [
        ("full", 20, 0, {}, 0),
        ("full", 20, 12, {}, 12),
        ("sliding_window", 20, 20, {}, 20),
        ("mla", 20, 20, {"seeded": True}, 20),
        ("state", 20, 19, {}, 0),
        ("state", 20, 20, {}, 1),
        # Within the prompt the next token is known, so every computed entry is final; the last waits for the seeds.
        ("full", 20, 12, {"module": 1}, 12),
        ("full", 20, 19, {"module": 1}, 19),
        ("full", 20, 20, {"module": 1}, 19),
        ("full", 20, 20, {"module": 1, "seeded": True}, 20),
        ("full", 1, 1, {"module": 1}, 0),
        ("full", 1, 1, {"module": 1, "seeded": True}, 1),
        ("full", 20, 12, {"module": 3}, 12),
        ("full", 20, 20, {"module": 3}, 17),
        ("full", 20, 20, {"module": 3, "seeded": True}, 18),
        ("full", 2, 2, {"module": 3, "seeded": True}, 0),
        ("full", 20, 12, {"module": None}, 12),
        ("full", 20, 20, {"module": None}, 20),
        ("compressed", 20, 7, {"rate": 4}, 4),
        ("compressed", 20, 20, {"rate": 4, "seeded": True}, 20),
        ("compressed", 3, 3, {"rate": 4}, 0),
    ],
)
def test_final_entries_of_each_kind_of_group(
    kind: Any, n: int, computed: int, options: dict[str, Any], final: int
) -> None:
    seeded = options.pop("seeded", False)
    window = 4 if kind == "sliding_window" else None
    assert Rules(kind, window=window, **options).final(n, computed, seeded=seeded) == final


@pytest.mark.parametrize("module", [0, 1, 2, 4, None])
def test_wanted_entries_become_final_and_stay_final(module: int | None) -> None:
    rules = Rules("full", module)
    for n in range(1, 40):
        steps = [Interval(0, rules.final(n, c)) for c in range(n + 1)]
        steps.append(Interval(0, rules.final(n, n, seeded=True)))
        assert all(before.stop <= after.stop for before, after in pairwise(steps))
        for hit in range(n + 1):
            want = rules.wanted(n, hit)
            assert steps[-1].covers(want)
            assert want.stop == steps[-1].stop
            if module and n >= module:
                # Without the seeds something is always missing: the hand-over of the last entry is never skipped.
                assert not steps[-2].covers(want)


@pytest.mark.parametrize("kind", ["full", "sliding_window"])
@pytest.mark.parametrize("module", [0, 1, 3, None])
def test_a_hit_and_a_transfer_cover_all_entries_that_are_read(
    kind: Literal["full", "sliding_window"], module: int | None
) -> None:
    """Together they hold every entry that a later query reads."""
    for window in (1, 3, 8) if kind == "sliding_window" else (None,):
        rules = Rules(kind, module, window)
        for n in range(1, 20):
            for found in range(n + 1):
                hit, want = rules.hit(found, n), rules.wanted(n, rules.hit(found, n))
                assert hit <= min(found, rules.final(n, n))
                assert want.start <= max(hit, rules.first_needed(want.stop))
                assert want.stop == rules.final(n, n, seeded=True)


def test_pages_of_a_request() -> None:
    assert [Rules("full").num_pages(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [Rules("state").num_pages(n, 1) for n in (0, 1, 99)] == [0, 1, 1]


def test_the_entry_that_a_window_still_needs() -> None:
    window = Rules("sliding_window", window=4)
    # The query at 10 sees keys 7 to 10.
    assert [window.first_needed(n) for n in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert Rules("full").first_needed(99) == Rules("state").first_needed(99) == 0


@pytest.mark.parametrize(
    ("rules", "found", "n", "hit"),
    [
        (Rules("full"), 7, 20, 7),
        (Rules("mla"), 25, 20, 20),
        (Rules("full", 1), 20, 20, 19),
        (Rules("full", 3), 20, 20, 17),
        (Rules("full", 3), 2, 2, 0),
        (Rules("full", None), 20, 20, 20),
        (Rules("state"), 19, 20, 0),
        (Rules("state"), 20, 20, 20),
        (Rules("compressed", rate=4), 19, 20, 16),
        (Rules("compressed", rate=4), 20, 20, 20),
    ],
)
def test_a_hit_is_what_can_be_started_from(rules: Rules, found: int, n: int, hit: int) -> None:
    assert rules.hit(found, n) == hit


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rules("full").wanted(0, 0),
        lambda: Rules("full").wanted(5, 6),
        lambda: Rules("full").wanted(5, -1),
        lambda: Rules("full", window=4),
        lambda: Rules("sliding_window"),
        lambda: Rules("sliding_window", window=0),
        lambda: Rules("full", -1),
        lambda: Rules("state", 1),
        lambda: Rules("compressed"),
        lambda: Rules("full", rate=4),
        lambda: Rules("full").final(5, 6),
        lambda: Rules("full").final(5, -1),
        lambda: Rules("full").final(5, 4, seeded=True),
    ],
)
def test_contradictions_are_refused(call: Any) -> None:
    with pytest.raises(ProtocolError):
        call()

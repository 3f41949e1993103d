"""What is final and what is wanted, row by row of the table, and at its corners."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from baton.errors import ProtocolError
from baton.kv.interval import Interval, final_interval, pages_of, wanted


def test_interval_arithmetic() -> None:
    a = Interval(3, 9)
    assert (len(a), a.empty, Interval(4, 4).empty) == (6, False, True)
    assert a.intersect(Interval(5, 20)) == Interval(5, 9)
    assert a.intersect(Interval(12, 20)) == Interval(12, 12)
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
    ("interval", "page_size", "pages"),
    [
        ((0, 16), 16, (0, 1)),
        ((0, 17), 16, (0, 2)),
        ((15, 16), 16, (0, 1)),
        ((16, 17), 16, (1, 2)),
        ((16, 16), 16, (1, 1)),
        ((6, 15), 7, (0, 3)),
    ],
)
def test_pages_of(interval: tuple[int, int], page_size: int, pages: tuple[int, int]) -> None:
    assert pages_of(Interval(*interval), page_size) == Interval(*pages)


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
        # The drafter's last entry moves with the seed, however long the hit.
        ("full", None, 20, 0, {"owner": "draft"}, (0, 20)),
        ("full", None, 20, 19, {"owner": "draft"}, (19, 20)),
        ("full", None, 20, 20, {"owner": "draft"}, (19, 20)),
        ("full", None, 1, 1, {"owner": "draft"}, (0, 1)),
        ("sliding_window", 8, 20, 0, {"owner": "draft"}, (13, 20)),
        ("sliding_window", 1, 20, 0, {"owner": "draft"}, (19, 20)),
        # Module j of k: [h', n - j + 1).
        ("full", None, 20, 0, {"owner": "draft", "module": 3}, (0, 18)),
        ("full", None, 20, 20, {"owner": "draft", "module": 3}, (17, 18)),
        ("full", None, 2, 0, {"owner": "draft", "module": 3}, (0, 0)),
    ],
)
def test_wanted(
    kind: Any, window: int | None, n: int, hit: int, options: dict[str, Any], want: tuple[int, int]
) -> None:
    assert wanted(kind, window, n, hit, **options) == Interval(*want)


@pytest.mark.parametrize(
    ("kind", "n", "computed", "options", "final"),
    [
        ("full", 20, 0, {}, 0),
        ("full", 20, 12, {}, 12),
        ("sliding_window", 20, 20, {}, 20),
        ("mla", 20, 20, {"seeded": True}, 20),
        ("state", 20, 19, {}, 0),
        ("state", 20, 20, {}, 1),
        # Within the prompt the next token is known, so every computed entry is final; the last waits for the
        # seed.
        ("full", 20, 12, {"owner": "draft"}, 12),
        ("full", 20, 19, {"owner": "draft"}, 19),
        ("full", 20, 20, {"owner": "draft"}, 19),
        ("full", 20, 20, {"owner": "draft", "seeded": True}, 20),
        ("full", 1, 1, {"owner": "draft"}, 0),
        ("full", 1, 1, {"owner": "draft", "seeded": True}, 1),
        ("full", 20, 12, {"owner": "draft", "module": 3}, 12),
        ("full", 20, 20, {"owner": "draft", "module": 3}, 17),
        ("full", 20, 20, {"owner": "draft", "module": 3, "seeded": True}, 18),
        ("full", 2, 2, {"owner": "draft", "module": 3, "seeded": True}, 0),
    ],
)
def test_final(kind: Any, n: int, computed: int, options: dict[str, Any], final: int) -> None:
    assert final_interval(kind, n, computed, **options) == Interval(0, final)


@pytest.mark.parametrize(("owner", "module"), [("target", 1), ("draft", 1), ("draft", 2), ("draft", 4)])
def test_what_is_wanted_is_final_with_the_seed_and_finality_only_grows(owner: Any, module: int) -> None:
    for n in range(1, 40):
        steps = [final_interval("full", n, c, owner=owner, module=module) for c in range(n + 1)]
        steps.append(final_interval("full", n, n, owner=owner, module=module, seeded=True))
        assert all(before.stop <= after.stop for before, after in pairwise(steps))
        for hit in range(n + 1):
            want = wanted("full", None, n, hit, owner=owner, module=module)
            assert steps[-1].covers(want)
            assert want.stop == steps[-1].stop
            if owner == "draft" and n >= module:
                # Without the seed something is always missing: the hand-over of the last entry is never
                # skipped.
                assert not steps[-2].covers(want)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wanted("full", None, 0, 0),
        lambda: wanted("full", None, 5, 6),
        lambda: wanted("full", None, 5, -1),
        lambda: wanted("full", 4, 5, 0),
        lambda: wanted("sliding_window", None, 5, 0),
        lambda: wanted("sliding_window", 0, 5, 0),
        lambda: wanted("full", None, 5, 0, module=2),
        lambda: wanted("full", None, 5, 0, owner="draft", module=0),
        lambda: wanted("state", None, 5, 0, owner="draft"),
        lambda: final_interval("full", 5, 6),
        lambda: final_interval("full", 5, -1),
        lambda: final_interval("full", 5, 4, seeded=True),
    ],
)
def test_contradictions_are_refused(call: Any) -> None:
    with pytest.raises(ProtocolError):
        call()

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.handoff.agent import attempts
from baton.handoff.agent.attempts import TOMBSTONE_S, AttemptTable
from baton.handoff.protocol.messages import AttemptKey

MARGIN = 0.25


def end(table: AttemptTable[Any], key: AttemptKey, expiry: float, now: float) -> None:
    table.add(key, SimpleNamespace(expiry=expiry, machine=SimpleNamespace(closed=True)))  # type: ignore[arg-type]
    table.to_tombstone(key, now)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 90)), min_size=1, max_size=40))
def test_a_tombstone_stays_until_nobody_can_ask_for_it(steps: list[tuple[int, int]]) -> None:
    """Each step: the lifetime of a ticket, and the time until the next attempt ends, in seconds."""
    table: AttemptTable[Any] = AttemptTable()
    now, until = 0.0, dict[AttemptKey, float]()
    for number, (life, pause) in enumerate(steps):
        key = AttemptKey(bytes([number % 3]) * 16, number, "p", "d")
        end(table, key, now + life, now)
        until[key] = max(now + life, now + TOMBSTONE_S) + MARGIN
        now += pause
        table.forget(now, MARGIN)
        kept = {key for key, last in until.items() if now <= last}
        assert table.ended.keys() == kept
        assert all(table.same_transfer(k) == {o for o in kept if o.transfer_id == k.transfer_id} for k in until)


def test_too_many_tombstones_lose_those_that_would_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_TOMBSTONES", 2)
    table: AttemptTable[Any] = AttemptTable()
    keys = [AttemptKey(bytes([number]) * 16, 0, "p", "d") for number in range(3)]
    for key, expiry in zip(keys, (300.0, 100.0, 200.0), strict=True):
        end(table, key, expiry, 0.0)
    assert table.ended.keys() == {keys[0], keys[2]}
    assert table.get(keys[1]) is None
    assert not table.same_transfer(keys[1])
    table.forget(200.0 + 2 * MARGIN, MARGIN)
    assert table.ended.keys() == {keys[0]}

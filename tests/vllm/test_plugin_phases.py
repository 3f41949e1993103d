"""Phases of a worker's legs: which orders of events are possible, and which are errors."""

from __future__ import annotations

import pytest

from baton.errors import UndefinedTransitionError
from baton.vllm.legs import EndPhase, WorkerDecode, WorkerPrefill


@pytest.mark.parametrize("order", [("finished", "released"), ("released", "finished")])
def test_blocks_may_be_freed_when_both_sides_have_ended(order: tuple[str, str]) -> None:
    leg = WorkerPrefill("r", 8, None, "push")
    leg.end_step(order[0])
    assert leg.end is not EndPhase.SETTLED
    leg.end_step(order[1])
    assert leg.end is EndPhase.SETTLED


@pytest.mark.parametrize("event", ["computed", "preempted"])
def test_preempted_blocks_are_not_computed_again_in_one_leg(event: str) -> None:
    leg = WorkerPrefill("r", 8, None, "push")
    leg.blocks_step("preempted")
    with pytest.raises(UndefinedTransitionError, match=event):
        leg.blocks_step(event)


@pytest.mark.parametrize("event", ["park", "place"])
def test_a_decode_leg_gets_blocks_once(event: str) -> None:
    leg = WorkerDecode("r", 1, "push")
    leg.step("park")
    with pytest.raises(UndefinedTransitionError, match=event):
        leg.step(event)

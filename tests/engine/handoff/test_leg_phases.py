"""Phases of an engine's leg: a decode leg is queued when it is ready and P has admitted it, in either order."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.legs.leg import Leg, LegStatus
from baton.errors import UndefinedTransitionError


@pytest.mark.parametrize("order", [("ready", "admitted"), ("admitted", "ready")])
def test_a_decode_leg_is_queued_when_both_have_come(order: tuple[str, str]) -> None:
    request: Any = None
    leg = Leg(request)
    leg.step(order[0])
    assert leg.phase is not LegStatus.QUEUED
    leg.step(order[1])
    assert leg.phase is LegStatus.QUEUED


def test_a_leg_is_made_ready_once() -> None:
    request: Any = None
    leg = Leg(request)
    leg.step("ready")
    with pytest.raises(UndefinedTransitionError, match="ready cannot happen in phase 'ready'"):
        leg.step("ready")


@pytest.mark.parametrize("event", ["ready", "admitted", "detach"])
def test_a_detached_leg_is_not_queued_again(event: str) -> None:
    request: Any = None
    leg = Leg(request, LegStatus.DETACHED)
    leg.step(event)
    assert not leg.attached

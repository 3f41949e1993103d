"""Each fault of a deployment has a line, and a healthy one has none."""

from __future__ import annotations

import dataclasses

import pytest

from baton.observe.faults import EngineView, count_faults, find_faults
from baton.observe.recent import RecentRequests
from baton.observe.timeline import RequestTimeline

PREFILL = EngineView("prefill-0", "http://p", "prefill", True, "", 0.2, 0)
DECODE = EngineView("decode-0", "http://d", "decode", True, "", 0.5, 0)
HEALTHY = (PREFILL, DECODE)
NOW = 1000.0


def ended(handoff_s: float, tpot_s: float = 0.01, error: str = "", at: float = NOW) -> RequestTimeline:
    """A handed-off request of five tokens that ended `at`. `handoff_s`: the second token comes so long after the
    first."""
    tokens = 3 * tpot_s
    made = RequestTimeline("a", "", at - handoff_s - tokens - 1.0, 0.0, 100)
    made.on_route(made.began, "handed_off", ("prefill-0", "decode-0"))
    for after, count in ((1.0, 1), (1.0 + handoff_s, 1), (1.0 + handoff_s + tokens, 3)):
        made.on_tokens(made.began + after, count, (), ())
    made.on_end(at, "error" if error else "length", error)
    return made


def recent(*requests: RequestTimeline) -> RecentRequests:
    made = RecentRequests()
    for request in requests:
        made.begin(request)
        made.end(request)
    return made


def test_a_healthy_deployment_has_no_fault() -> None:
    fine = recent(*(ended(0.04) for _ in range(50)))
    assert find_faults(HEALTHY, {"handed_off": 60, "short": 40}, fine, NOW) == []
    assert find_faults(HEALTHY, {}, recent(), NOW) == []


@pytest.mark.parametrize("problem", ["engine http://p: does not answer", "engine http://p does not answer"])
def test_an_engine_that_cannot_be_used_is_named_once(problem: str) -> None:
    lost = dataclasses.replace(PREFILL, usable=False, problem=problem)
    assert find_faults([lost, DECODE], {"handed_off": 1}, recent(), NOW) == [
        "engine http://p (prefill) cannot be used: does not answer"
    ]


def test_an_engine_of_another_model_has_a_line_that_can_be_read() -> None:
    """Nearly all its facts differ."""
    other = dataclasses.replace(PREFILL, usable=False, problem="incompatible peer: model: " + "x" * 2000)
    (line,) = find_faults([other, DECODE], {}, recent(), NOW)
    assert line.startswith("engine http://p (prefill) cannot be used: incompatible peer: model: x")
    assert line.endswith("... (all of it: problem in /status)")
    assert len(line) < 400


@pytest.mark.parametrize(("usage", "waiting", "told"), [(0.95, 0, ""), (0.6, 3, ", 3 requests wait there")])
def test_an_engine_whose_kv_is_used_up_is_named(usage: float, waiting: int, told: str) -> None:
    full = dataclasses.replace(DECODE, kv_usage=usage, num_waiting=waiting)
    assert find_faults([PREFILL, full], {}, recent(), NOW) == [
        f"decode engine decode-0 is full: {usage:.0%} of its KV is in use{told}"
    ]
    assert find_faults([PREFILL, dataclasses.replace(full, kv_usage=0.4)], {}, recent(), NOW) == []


def test_that_nothing_is_handed_off_is_told_with_the_reasons() -> None:
    routes = {"short": 15, "no_prefill_engine": 5}
    reasons = "15 because the prompt was short; 5 because no prefill engine answered"
    told = f"none of the last 20 requests was handed off: {reasons}"
    assert find_faults(HEALTHY, routes, recent(), NOW) == [told]
    assert find_faults([dataclasses.replace(DECODE, role="both")], routes, recent(), NOW) == [], "as it should be"
    assert find_faults(HEALTHY, {"short": 19}, recent(), NOW) == [], "too few"


def test_slow_handoffs_are_told_from_slow_engines() -> None:
    slow = recent(*(ended(0.5) for _ in range(9)))
    (line,) = find_faults(HEALTHY, {"handed_off": 9}, slow, NOW)
    assert line.startswith("handoffs are slow: the second token comes 500 ms after the first, later ones every ")
    slow_engines = recent(*(ended(0.5, tpot_s=0.2) for _ in range(9)))
    assert find_faults(HEALTHY, {"handed_off": 9}, slow_engines, NOW) == []
    assert find_faults(HEALTHY, {"handed_off": 9}, slow, NOW + 100.0) == [], "it was long ago"
    assert find_faults(HEALTHY, {"handed_off": 4}, recent(*(ended(0.5) for _ in range(4))), NOW) == [], "too few"


def test_failed_requests_are_told_with_the_last_error() -> None:
    failing = recent(*(ended(0.0) for _ in range(30)), *(ended(0.0, error=f"bad ticket {n}") for n in range(5)))
    assert find_faults(HEALTHY, {"handed_off": 9}, failing, NOW) == [
        "5 of the last 20 requests failed; the last one: bad ticket 4"
    ]
    few = recent(*(ended(0.0) for _ in range(30)), *(ended(0.0, error="bad ticket") for _ in range(4)))
    assert find_faults(HEALTHY, {"handed_off": 9}, few, NOW) == []


def test_faults_are_counted_by_kind() -> None:
    slow, failed = (ended(0.5) for _ in range(10)), (ended(0.5, error="it failed") for _ in range(10))
    wrong = recent(*slow, *failed)
    lost = dataclasses.replace(PREFILL, usable=False)
    told = count_faults([lost, DECODE], {"short": 100}, wrong, NOW)
    assert told == {"lost_engine": 1, "not_handed_off": 1, "slow_handoffs": 1, "failed_requests": 1}
    assert set(count_faults(HEALTHY, {"handed_off": 100}, recent(ended(0.04)), NOW).values()) == {0}


def test_slow_handoffs_are_not_reported_beside_a_full_decode_engine() -> None:
    full = [dataclasses.replace(engine, kv_usage=0.99) for engine in HEALTHY]
    slow = recent(*(ended(0.5) for _ in range(50)))
    assert find_faults(full, {}, slow, NOW) == ["decode engine decode-0 is full: 99% of its KV is in use"]
    assert find_faults([full[0], DECODE], {}, recent(), NOW) == [
        "prefill engine prefill-0 is full: 99% of its KV is in use"
    ]
    (told,) = find_faults(HEALTHY, {}, slow, NOW)
    assert told.startswith("handoffs are slow")

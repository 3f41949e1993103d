"""Alarms on acceptance: none in healthy traffic, and a broken drafter is named."""

from __future__ import annotations

import random

import pytest

from baton.observe.acceptance import AcceptanceTotals, Group, RequestAcceptance
from baton.observe.alarm import AcceptanceAlarms
from baton.observe.detector import THRESHOLD, DropDetector

K = 3
# Acceptance of each draft, given that the ones before it are accepted: the demo model's EAGLE-3 drafter.
HEALTHY, BROKEN = (0.567, 0.523, 0.585), (0.03, 0.02, 0.02)


def request(rng: random.Random, group: Group, first: tuple[float, ...], later: tuple[float, ...]) -> RequestAcceptance:
    """A request of 1 to 20 verifications. Prompts differ in how well their continuation can be drafted."""
    ease = rng.uniform(0.8, 1.2)

    def accepted(rates: tuple[float, ...]) -> int:
        for count, rate in enumerate(rates):
            if rng.random() >= rate * ease:
                return count
        return K

    num_later = rng.randrange(20)
    found = [accepted(first), *(accepted(later) for _ in range(num_later))]
    return RequestAcceptance(group, found, [K] * len(found))


def handed(decode: int, prefill: int = 0) -> Group:
    return Group("handed_off", f"prefill-{prefill}", f"decode-{decode}")


def local(decode: int) -> Group:
    return Group("short", "", f"decode-{decode}")


@pytest.mark.parametrize("seed", range(3))
def test_no_alarm_in_10_000_healthy_requests(seed: int) -> None:
    rng, alarms = random.Random(seed), AcceptanceAlarms()
    groups = [handed(0), handed(1), handed(0, 1), handed(1, 1), local(0), local(1)]
    for _ in range(10_000):
        # Handed-off prompts are longer and a little harder than local ones.
        group = rng.choice(groups)
        rates = tuple(rate - 0.05 for rate in HEALTHY) if group.handed_off else HEALTHY
        alarms.observe(request(rng, group, rates, rates))
        assert not alarms.alarms()
    assert alarms.num_comparisons() > 10_000


def requests_until_named(seed: int, healthy_before: int) -> int:
    """The number of requests on decode-1 until it is named, once its drafter has other weights. The prefill engine's
    drafts are good, so first verifications after a handoff are too.
    """
    rng, alarms = random.Random(seed), AcceptanceAlarms()
    for _ in range(healthy_before):
        alarms.observe(request(rng, handed(rng.randrange(2)), HEALTHY, HEALTHY))
    for count in range(1, 1000):
        alarms.observe(request(rng, handed(0), HEALTHY, HEALTHY))
        alarms.observe(request(rng, handed(1), HEALTHY, BROKEN))
        if alarms.alarms():
            assert {alarm.suspect for alarm in alarms.alarms()} == {"decode-1"}
            return count
    raise AssertionError("it was never named")


@pytest.mark.parametrize("healthy_before", [0, 5000])
def test_a_broken_drafter_is_named_within_100_requests(healthy_before: int) -> None:
    counts = [requests_until_named(seed, healthy_before) for seed in range(20 if healthy_before == 0 else 2)]
    assert max(counts) <= 100, counts


def test_bad_drafts_of_the_prefill_engine_are_told_by_local_requests() -> None:
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(300):
        alarms.observe(request(rng, handed(0), BROKEN, HEALTHY))
        alarms.observe(request(rng, local(0), HEALTHY, HEALTHY))
    (found,) = {(alarm.group, alarm.part) for alarm in alarms.alarms()}
    assert found == (handed(0), "first_verification")
    assert all(alarm.suspect == "prefill-0 to decode-0" for alarm in alarms.alarms())


def test_one_pair_without_local_requests_is_compared_with_itself() -> None:
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(400):
        alarms.observe(request(rng, handed(0), HEALTHY, BROKEN))
    (alarm,) = alarms.alarms()
    assert (alarm.part, alarm.reference, alarm.suspect) == ("later_verifications", "itself", "decode-0")
    assert "acceptance of decode-0 is too low" in alarm.describe()


def test_an_alarm_ends_after_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "baton.observe")
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for later in (BROKEN, HEALTHY):
        for _ in range(300):
            alarms.observe(request(rng, handed(0), HEALTHY, HEALTHY))
            alarms.observe(request(rng, handed(1), HEALTHY, later))
        assert bool(alarms.alarms()) == (later is BROKEN)
    lines = [record.message for record in caplog.records]
    assert any(line.startswith("acceptance of decode-1 is too low") for line in lines)
    assert lines[-1].startswith("acceptance of decode-1 is normal again")


def test_false_alarms_of_the_detector_are_bounded() -> None:
    """At the edge of the null hypothesis, the mean of the statistic grows by at most one per pair."""
    rng = random.Random(0)
    detectors = [DropDetector(0.1) for _ in range(200)]
    for detector in detectors:
        for _ in range(500):
            detector.observe(float(rng.random() < 0.5), float(rng.random() < 0.6))
    assert not any(detector.alarmed for detector in detectors)
    # The mean of the statistic is at most the number of pairs, so by Markov one of 200 exceeds 1e5 by chance.
    assert sum(detector.statistic >= 1e5 for detector in detectors) <= 4
    assert max(detector.statistic for detector in detectors) < THRESHOLD


def test_totals_by_group_are_bounded() -> None:
    totals = AcceptanceTotals(max_groups=2)
    for number in (0, 1, 0, 2):
        totals.observe(RequestAcceptance(handed(number), [2, 0, 1], [3, 3, 2]))
    assert [group for group, _ in totals] == [handed(0), handed(2)]
    told = totals.describe()[0]
    assert told["num_requests"] == 2
    first, later = told["first_verification"], told["later_verifications"]
    assert first == {"num_verifications": 2, "acceptance": 2 / 3, "acceptance_per_pos": [1.0, 1.0, 0.0]}
    assert later == {"num_verifications": 4, "acceptance": 1 / 5, "acceptance_per_pos": [0.5, 0.0, 0.0]}

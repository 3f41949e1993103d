"""Alarms on acceptance: none in healthy traffic, and a broken drafter is named."""

from __future__ import annotations

import random

import pytest

from baton.observe.acceptance import AcceptanceTotals, RequestAcceptance
from baton.observe.alarm import AcceptanceAlarms
from baton.observe.detector import THRESHOLD, DropDetector
from baton.observe.expected import DraftPair
from baton.observe.samples import LIFE, Sample, SamplePool
from benchmarks.faults.modelled_drafters import (
    BROKEN,
    HEALTHY,
    PARTLY_BROKEN,
    HealthyTraffic,
    handed,
    local,
    request,
    requests_until_named,
)


@pytest.mark.parametrize("seed", range(2))
def test_no_alarm_in_10_000_healthy_requests(seed: int) -> None:
    traffic, alarms = HealthyTraffic(seed), AcceptanceAlarms()
    for _ in range(10_000):
        alarms.observe(traffic.request())
        assert not alarms.alarms()
    assert alarms.num_comparisons() > 25_000


@pytest.mark.parametrize("healthy_before", [0, 3000])
@pytest.mark.parametrize("share_handed", [1.0, 0.6])
def test_a_broken_drafter_is_named_within_100_requests(healthy_before: int, share_handed: float) -> None:
    """Over all its routes together."""
    seeds = range(20 if healthy_before == 0 else 2)
    found = [requests_until_named(seed, healthy_before, share_handed) for seed in seeds]
    assert max(count for count, _ in found) <= 100, found
    assert all(named == {"decode-1"} for _, named in found)


@pytest.mark.parametrize("healthy_before", [0, 3000])
def test_a_partly_broken_drafter_is_named_by_the_prefill_engines_drafts(healthy_before: int) -> None:
    seeds = range(3 if healthy_before == 0 else 1)
    found = [requests_until_named(seed, healthy_before, 1.0, PARTLY_BROKEN) for seed in seeds]
    assert max(count for count, _ in found) <= 600, found
    assert all(named == {"decode-1"} for _, named in found)


@pytest.mark.parametrize("num_prompts", [5, 1000])
def test_a_prompt_that_is_sent_again_and_again_counts_once(num_prompts: int) -> None:
    alarms = AcceptanceAlarms()
    for number in range(1000):
        alarms.observe(RequestAcceptance(handed(0), [0, 2, 2], [3, 3, 3], number % num_prompts))
    assert bool(alarms.alarms()) == (num_prompts > 100)


def test_bad_drafts_of_one_prefill_engine_do_not_make_good_ones_of_a_decode_engine_suspect() -> None:
    """Each prefill engine sends to one decode engine."""
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(2000):
        for engine, first in enumerate((PARTLY_BROKEN, HEALTHY)):
            alarms.observe(request(rng, handed(engine, engine), first, HEALTHY))
    assert alarms.alarms() == []


def test_drafts_are_compared_at_the_positions_of_the_first_verification() -> None:
    assert DraftPair.of(RequestAcceptance(handed(0), [3, 2, 0, 1], [3, 3, 3, 3])) == DraftPair(1.0, 3 / 9)
    assert DraftPair.of(RequestAcceptance(handed(0), [3, 2, 1], [3, 3, 1])) == DraftPair(1.0, 2 / 3)
    assert DraftPair.of(RequestAcceptance(handed(0), [3, 1, 1], [3, 1, 2])) == DraftPair(1.0, 1 / 2)
    assert DraftPair.of(RequestAcceptance(handed(0), [2, 0, 2], [2, 0, 4])) == DraftPair(1.0, 1.0)
    nothing = ([1], [3]), ([1, 0], [3, 0]), ([0, 1], [0, 3]), ([], [])
    assert [DraftPair.of(RequestAcceptance(handed(0), *counts)) for counts in nothing] == [None] * 4
    assert DraftPair.of(RequestAcceptance(local(0), [1, 1], [3, 3])) is None


def test_bad_drafts_of_the_prefill_engine_are_told_by_local_requests() -> None:
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(300):
        alarms.observe(request(rng, handed(0), BROKEN, HEALTHY))
        alarms.observe(request(rng, local(0), HEALTHY, HEALTHY))
    (alarm,) = alarms.alarms()
    assert (alarm.part, alarm.reference, alarm.suspect) == ("first_verification", "local", "prefill-0 to decode-0")
    assert alarm.describe().startswith("acceptance of prefill-0 to decode-0 is too low: ")


def test_bad_drafts_of_one_of_two_prefill_engines_are_told_by_the_other() -> None:
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(300):
        for prefill, first in enumerate((BROKEN, HEALTHY)):
            alarms.observe(request(rng, handed(0, prefill), first, HEALTHY))
    assert {(alarm.reference, alarm.suspect) for alarm in alarms.alarms()} == {
        ("other_engines", "prefill-0 to decode-0")
    }


def test_drafts_that_fail_only_after_a_handoff_are_told_by_local_requests() -> None:
    """The drafter's KV arrives wrong: the decode engine's own drafts are bad, and good without a handoff."""
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(300):
        alarms.observe(request(rng, handed(0), HEALTHY, BROKEN))
        alarms.observe(request(rng, local(0), HEALTHY, HEALTHY))
    (alarm,) = alarms.alarms()
    assert (alarm.part, alarm.reference, alarm.suspect) == ("later_verifications", "local", "decode-0")
    assert "later verifications after a handoff from prefill-0" in alarm.describe()


def test_one_pair_without_local_requests_is_compared_with_itself() -> None:
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(300):
        alarms.observe(request(rng, handed(0), HEALTHY, BROKEN))
    (alarm,) = alarms.alarms()
    assert (alarm.part, alarm.reference, alarm.suspect) == ("later_verifications", "itself", "decode-0")
    assert "acceptance of decode-0 is too low" in alarm.describe()


def test_a_first_verification_that_is_always_accepted_is_no_alarm_where_others_know_it_too() -> None:
    rng, alarms = random.Random(0), AcceptanceAlarms()
    for _ in range(2000):
        group = rng.choice([handed(0), local(0)])
        alarms.observe(request(rng, group, (0.95, 0.9, 0.9), (0.2, 0.2, 0.2)))
    assert alarms.alarms() == []


def test_requests_of_long_ago_are_no_reference() -> None:
    rng, pool = random.Random(0), SamplePool()
    for number in range(1, 21):
        pool.add(Sample.of(request(rng, local(0), HEALTHY, HEALTHY), number))
    pool.forget(LIFE + 17)
    assert pool.mean("first_verification") is not None
    pool.forget(LIFE + 18)  # three are left
    assert pool.mean("first_verification") is None


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
    """At the edge of the null hypothesis, the mean of the statistic grows by at most one per observation."""
    rng = random.Random(0)
    detectors = [DropDetector() for _ in range(200)]
    for detector in detectors:
        for _ in range(500):
            detector.observe(float(rng.random() < 0.4), 0.4)
    assert not any(detector.alarmed for detector in detectors)
    # The mean of the statistic is at most 500, so by Markov one of 200 exceeds 1e5 by chance.
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

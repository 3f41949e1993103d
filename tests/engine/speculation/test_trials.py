"""Steps with drafts and without are compared by what they took."""

from __future__ import annotations

import pytest

from baton.engine.speculation import trials as module
from baton.engine.speculation.trials import Trials

# Periods in turns, with drafts first, until one kind is chosen.
FIRST = [number % 2 == 0 for number in range(module.FIRST + 1)]
# In periods of 8 steps.
TRY_AFTER, TRY_SELDOM = module.TRY_AFTER // 8, module.TRY_SELDOM // 8


def periods(trials: Trials, count: int, num_requests: int, paid: float, steps: int = 8) -> list[bool]:
    """Run periods in which a step with drafts makes `paid` times as many tokens a second. Whether each drafted."""
    found = []
    for _ in range(count):
        drafts = trials.begin(num_requests)
        found.append(drafts)
        for _ in range(steps):
            trials.computed(num_requests, 0, 1.0 / paid if drafts else 1.0)
    return found


def test_both_are_tried_and_the_faster_stays() -> None:
    assert periods(Trials(), 9, 16, paid=1.05) == [*FIRST, True, True, True, True]
    assert periods(Trials(), 9, 16, paid=0.9) == [*FIRST, False, False, False, False]


def test_few_tokens_do_not_overrule_the_model() -> None:
    """By chance, a single request's drafts can look slower for some time."""
    assert periods(Trials(), 9, 1, paid=0.9) == [*FIRST, True, True, True, True]
    assert not any(periods(Trials(), 9, 1, paid=0.6)[len(FIRST) :])
    slower = periods(Trials(), 8 * TRY_AFTER, 32, paid=0.97)
    assert slower[-4 * TRY_AFTER :].count(True) == 1


def test_the_slower_is_tried_less_often_the_longer_it_is() -> None:
    tries = [len(FIRST) + TRY_AFTER + 1]
    for factor in (2, 4, 8):
        tries.append(tries[-1] + 1 + factor * TRY_AFTER)
    tries += [tries[-1] + 1 + TRY_SELDOM, tries[-1] + 2 + 2 * TRY_SELDOM]
    found = periods(Trials(), tries[-1], 16, paid=0.9)
    assert [number for number, drafts in enumerate(found, 1) if drafts] == [1, 3, 5, *tries]
    found = periods(Trials(), tries[-1], 16, paid=1.1)
    assert [number for number, drafts in enumerate(found, 1) if not drafts] == [2, 4, *tries]


def test_a_long_period_does_not_skip_a_try() -> None:
    trials = Trials()
    assert periods(trials, 5, 16, paid=0.9) == FIRST
    assert periods(trials, 5, 16, paid=0.9, steps=40) == [False, False, False, False, True]


def test_tries_lose_little_time() -> None:
    assert periods(Trials(), 3 * TRY_AFTER, 16, paid=1.5).count(False) == 2
    assert periods(Trials(), 3 * TRY_AFTER, 16, paid=0.5).count(True) == 3


def test_short_periods_are_no_reason_to_try() -> None:
    """Each new request begins one; a try lasts until it has had some steps."""
    trials = Trials()
    periods(trials, 5, 16, paid=0.9)
    assert not any(periods(trials, 8 * TRY_AFTER, 16, paid=0.9, steps=1))
    assert periods(trials, 9, 16, paid=0.9, steps=1) == [True] * 8 + [False]


def test_batches_of_each_size_are_compared_for_themselves() -> None:
    trials = Trials()
    assert not any(periods(trials, 8, 16, paid=0.9)[5:])
    assert not any(periods(trials, 2, 15, paid=0.9))
    assert periods(trials, 7, 2, paid=1.3) == [*FIRST, True, True]
    assert not any(periods(trials, 2, 16, paid=0.9))  # remembered


def test_steps_of_another_size_are_not_counted() -> None:
    """Requests end within a period."""
    trials = Trials()
    periods(trials, 5, 16, paid=1.05)
    for _ in range(4):
        assert trials.begin(16)
        for _ in range(8):
            trials.computed(2, 0, 1.0)


def test_what_changes_with_time_is_noticed_and_begins_anew() -> None:
    trials = Trials()
    assert periods(trials, 8 * TRY_AFTER, 16, paid=0.9).count(True) == 6
    assert all(periods(trials, 16 * TRY_AFTER, 16, paid=1.3)[-TRY_AFTER + 1 :])
    found = periods(trials, 16 * TRY_AFTER, 16, paid=0.8)
    assert found.count(False) > 8 * TRY_AFTER


def test_the_step_after_a_change_is_not_counted() -> None:
    """It still verifies the drafts of the period before it, or lacks those of its own."""
    trials = Trials()
    for number in range(40):
        drafts = trials.begin(16)
        trials.computed(16, 0, 9.0 if number < 2 else 1.0)  # slow after each of the first two changes
        for _ in range(7):
            trials.computed(16, 0, 0.9 if drafts else 1.0)
    assert [trials.begin(16) for _ in range(3)] == [True] * 3


def test_steps_outside_of_periods_are_not_counted() -> None:
    trials = Trials()
    periods(trials, 5, 16, paid=1.05)
    trials.end()
    trials.computed(16, 0, 1000.0)
    assert periods(trials, 3, 16, paid=1.05) == [True] * 3


def test_a_step_that_was_disturbed_does_not_decide() -> None:
    """A machine that was suspended for a minute would look slow for thousands of periods."""
    trials = Trials()
    periods(trials, 7, 16, paid=1.3)
    assert trials.begin(16)
    trials.computed(16, 0, 60.0)
    assert periods(trials, 3, 16, paid=1.3) == [True] * 3
    # Steps that take twice as long from now on count in full soon.
    assert periods(trials, 16 * TRY_AFTER, 16, paid=0.5)[-TRY_AFTER:].count(True) <= 1


@pytest.mark.parametrize("paid", [1.1, 0.9])
def test_a_machine_that_becomes_slower_does_not_decide(paid: float) -> None:
    """Other work makes all steps take twice as long, for as long as there is between two tries."""
    trials, found = Trials(), []
    for number in range(32 * TRY_AFTER):
        slow = 1.0 + number // TRY_AFTER % 2
        drafts = trials.begin(16)
        found.append(drafts)
        for _ in range(8):
            trials.computed(16, 0, slow / paid if drafts else slow)
    assert found.count(paid < 1.0) <= 32


def test_one_slow_try_does_not_decide() -> None:
    trials = Trials()
    for number in range(2 * len(FIRST)):
        drafts = trials.begin(16)
        for _ in range(8):
            trials.computed(16, 0, 1.2 if number == 0 else 1.0 / 1.1 if drafts else 1.0)
    assert drafts

"""Steps with drafts and without are compared by what they took."""

from __future__ import annotations

from baton.engine.speculation.trials import TRY_EVERY, TRY_SELDOM, Trials


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
    assert periods(Trials(), 7, 16, paid=1.05) == [True, False, True, True, True, True, True]
    assert periods(Trials(), 7, 16, paid=0.9) == [True, False, False, False, False, False, False]


def test_few_tokens_do_not_overrule_the_model() -> None:
    """By chance, a single request's drafts can look slower for some time."""
    assert periods(Trials(), 7, 1, paid=0.9) == [True, False, True, True, True, True, True]
    assert not any(periods(Trials(), 7, 1, paid=0.6)[1:])
    slower = periods(Trials(), 12 * TRY_EVERY, 32, paid=0.97)
    assert slower[-2 * TRY_EVERY :].count(True) == 2


def test_the_slower_is_tried_again_now_and_then() -> None:
    found = periods(Trials(), 5 * TRY_EVERY, 16, paid=0.9)
    assert [number + 1 for number, drafts in enumerate(found[1:], 1) if drafts] == list(
        range(TRY_EVERY, 5 * TRY_EVERY + 1, TRY_EVERY)
    )
    found = periods(Trials(), 2 * TRY_SELDOM, 16, paid=1.4)
    assert [number + 1 for number, drafts in enumerate(found) if not drafts] == [2, TRY_SELDOM, 2 * TRY_SELDOM]


def test_another_batch_begins_anew_and_a_like_one_does_not() -> None:
    trials = Trials()
    assert not any(periods(trials, 5, 16, paid=0.9)[2:])
    assert not any(periods(trials, 2, 15, paid=0.9))
    assert periods(trials, 4, 2, paid=1.3) == [True, False, True, True]


def test_what_changes_with_time_is_noticed() -> None:
    trials = Trials()
    assert not any(periods(trials, 4 * TRY_EVERY - 1, 16, paid=0.9)[2 + TRY_EVERY : 2 * TRY_EVERY - 1])
    assert all(periods(trials, 8 * TRY_EVERY, 16, paid=1.3)[-TRY_EVERY + 1 :])


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
    periods(trials, 2, 16, paid=1.05)
    trials.end()
    trials.computed(16, 0, 1000.0)
    assert periods(trials, 3, 16, paid=1.05) == [True] * 3

"""The choice of k against all choices, and the estimates that it is made from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.speculation.acceptance_rates import FIRST_GUESS, UNKNOWN, AcceptanceRates, OwnFactor, classes_of
from baton.engine.speculation.cost_model import LinearCost
from baton.engine.speculation.draft_choice import LEAST_GAIN, RoundCosts, choose_drafts

FloatArray = npt.NDArray[np.float64]


def round_costs(
    draft: float, verified: float = 0.0, base: float = 1.0, start: float = 0.0, depth: float = 0.0, most: int = 32
) -> RoundCosts:
    return RoundCosts(base, start, depth, draft, verified * np.arange(1.0 + most))


def rate(survival: FloatArray, bounds: Sequence[int], kept: Sequence[int], costs: RoundCosts) -> float:
    """Expected tokens per second of making `bounds` drafts and verifying `kept` of them, written out."""
    tokens = sum(1 + survival[r, :k].sum() for r, k in enumerate(kept))
    seconds = costs.base + costs.start * (max(bounds) > 0) + costs.depth * max(bounds) + costs.draft * sum(bounds)
    return float(tokens / (seconds + costs.verified[sum(kept)]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(0, 3)), min_size=1, max_size=3),
    st.floats(0.1, 10),
    st.tuples(st.floats(0, 2), st.floats(0, 2)),
    st.tuples(st.floats(0, 3), st.floats(0.01, 3)),
)
def test_no_other_choice_gives_more_tokens_a_second(
    requests: list[tuple[list[float], int]],
    base: float,
    start_depth: tuple[float, float],
    costs_of: tuple[float, float],
) -> None:
    """All requests draft as deep, and any number of their drafts are verified."""
    survival = np.array([conditional for conditional, _ in requests]).cumprod(axis=1)
    most = np.array([limit for _, limit in requests])
    costs = round_costs(*costs_of, base, *start_depth)
    choice = choose_drafts(survival[:, None], most, costs)
    assert ((choice.counts >= 0) & (choice.counts <= most)).all()
    best = rate(survival, [0] * len(most), [0] * len(most), costs)
    none = best
    for depth in range(1, 4):
        bounds = np.minimum(most, depth).tolist()
        best = max(
            best, *(rate(survival, bounds, k, costs) for k in itertools.product(*(range(b + 1) for b in bounds)))
        )
    if not choice.counts.any():
        assert none >= best / (LEAST_GAIN + 1e-9)
        return
    kept = [
        int((row[:count] >= choice.threshold).sum())
        for row, count in zip(survival, choice.counts.tolist(), strict=True)
    ]
    # Not making drafts that will not be verified can only help.
    assert rate(survival, choice.counts.tolist(), kept, costs) >= best * (1 - 1e-9)


@pytest.mark.parametrize("free", [3, 6])
def test_no_more_drafts_are_verified_than_rows_that_cost_little(free: int) -> None:
    survival = (np.full((4, 8), 0.8) - np.arange(4)[:, None] / 100).cumprod(axis=1)
    verified = 0.01 * np.arange(33) + np.maximum(np.arange(33) - free, 0) * 10.0
    choice = choose_drafts(survival[:, None], np.full(4, 8), RoundCosts(1.0, 0.0, 0.0, 0.001, verified))
    assert (survival >= choice.threshold).sum() == free


def test_higher_costs_lower_k() -> None:
    survival, most = np.full((4, 1, 8), 0.8).cumprod(axis=2), np.full(4, 8)

    def total(draft: float, verified: float = 0.001, depth: float = 0.0) -> int:
        return int(choose_drafts(survival, most, round_costs(draft, verified, depth=depth)).counts.sum())

    assert total(0.0) == 32
    assert 32 > total(0.05) > total(0.1) > total(0.5) == 0
    assert 32 > total(0.0, 0.05) > total(0.0, 0.1) > total(0.0, 0.5) == 0
    assert total(0.001) > total(0.001, depth=0.3) > 0


def test_drafts_that_are_likely_wrong_are_not_verified_where_rows_cost_much() -> None:
    """Half of the cases are nearly sure. Without telling them apart no draft would pay."""
    cases = np.array([[0.95, 0.9], [0.1, 0.01]])
    costs = round_costs(0.01, 0.7, base=8.0)
    told = choose_drafts(np.broadcast_to(cases, (8, 2, 2)), np.full(8, 2), costs)
    assert told.counts.any()
    assert 0.1 < told.threshold <= 0.95
    untold = choose_drafts(np.broadcast_to(cases.mean(axis=0), (8, 1, 2)), np.full(8, 2), costs)
    assert not untold.counts.any()


def test_a_request_whose_drafts_are_accepted_gets_more_than_its_neighbour() -> None:
    rates = AcceptanceRates(8)
    good, bad = OwnFactor(), OwnFactor()
    for _ in range(40):
        rates.verified(good, [3] * 4, 4)
        rates.verified(bad, [3] * 4, 0)
        rates.update()
    survival = rates.survival(np.array([good.factor, bad.factor, 1.0]), np.full((3, 8), 3))
    assert survival[0, 0] > survival[2, 0] + 0.2 > survival[1, 0] + 0.4
    assert survival[0, 0] > 0.8
    assert survival[1, 0] < 0.4
    assert (np.diff(survival, axis=1) <= 0).all()
    counts = choose_drafts(survival[:2, None], np.full(2, 8), round_costs(0.02, 0.18)).counts
    assert counts[0] > counts[1]


def test_positions_that_were_never_tried_are_as_good_as_the_one_before() -> None:
    rates = AcceptanceRates(4)
    unknown = np.full((1, 4), UNKNOWN)
    assert rates.survival(np.ones(1), unknown)[0, 0] == FIRST_GUESS
    for _ in range(200):
        rates.verified(OwnFactor(), [UNKNOWN] * 2, 1)  # the first draft always, the second never
    rates.update()
    first, second, third, _ = rates.survival(np.ones(1), unknown)[0]
    assert first > 0.9
    assert second < 0.1 * first
    assert third < 0.1 * second


def test_acceptance_is_learned_for_each_class_of_margins() -> None:
    rates, random = AcceptanceRates(2), np.random.default_rng(0)
    assert classes_of([0.0, 0.3, 100.0, np.inf, np.nan]).tolist() == [0, 1, UNKNOWN - 1, UNKNOWN, UNKNOWN]
    for _ in range(4000):
        margin_class = int(random.integers(0, 2)) * 5
        rates.verified(OwnFactor(), [margin_class], int(random.random() < (0.9 if margin_class else 0.2)))
    rates.update()
    assert rates.rates[0, [0, 5]] == pytest.approx([0.2, 0.9], abs=0.05)
    # Cases are the latest drafts: three of four are sure.
    for _ in range(100):
        rates.drafted(np.array([[5], [5], [0], [5]]))
    expected = rates.expected(np.ones(1))
    assert expected.shape == (1, 256, 2)
    assert (expected[0, :, 0] > 0.8).mean() == pytest.approx(0.75, abs=0.02)
    assert rates.expected(np.ones(300)).shape == (300, 1, 2)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_are_found_from_forwards(noise: float) -> None:
    true, random = np.array([10.0, 0.5, 0.0, 0.001]), np.random.default_rng(0)
    cost = LinearCost((1.0, 16.0, 8.0, 4096.0))
    for _ in range(300):
        parts = np.array([1.0, random.integers(1, 64), random.integers(1, 16), random.integers(0, 9000)])
        cost.observe(parts, float(parts @ true * (1 + noise * random.standard_normal())))
        cost.fit()
    assert cost.each() == pytest.approx(true, rel=0.02 + 2 * noise, abs=0.02 + noise)


def test_batches_of_one_size_do_not_unlearn_the_slope() -> None:
    cost = LinearCost((1.0, 16.0))
    for rows in (1, 8, 32) * 20:
        cost.observe((1.0, rows), 10.0 + rows)
        cost.fit()
    for _ in range(500):
        cost.observe((1.0, 8), 2 * 18.0)  # the machine is half as fast
        cost.fit()
    assert cost.seconds((1.0, 8)) == pytest.approx(36.0, rel=0.02)
    assert 0.8 < cost.each()[1] < 3.0
    cost.observe((1.0, 8), 1e6)  # another process stopped this one
    cost.fit()
    assert cost.seconds((1.0, 8)) < 60.0

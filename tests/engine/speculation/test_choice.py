"""The choice of k against all choices, and the estimates that it is made from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.speculation.acceptance_rates import FIRST_GUESS, AcceptanceRates
from baton.engine.speculation.cost_model import LinearCost
from baton.engine.speculation.draft_choice import LEAST_GAIN, RoundCosts, choose_drafts


def rate(survival: np.ndarray, counts: Sequence[int], costs: RoundCosts) -> float:
    """Expected tokens per second, written out."""
    tokens = sum(1 + survival[r, :k].sum() for r, k in enumerate(counts))
    seconds = costs.base + costs.depth * max(counts) + sum(costs.draft[r] * k for r, k in enumerate(counts))
    seconds += costs.start * (max(counts) > 0) + costs.more[sum(counts)]
    return float(tokens / seconds)


def round_costs(draft: Sequence[float], base: float = 1.0, start: float = 0.0, depth: float = 0.0) -> RoundCosts:
    return RoundCosts(base, start, np.array(draft), depth, np.zeros(1 + 8 * len(draft)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(0, 3)), min_size=1, max_size=3),
    st.floats(0.1, 10),
    st.tuples(st.floats(0, 2), st.floats(0, 2)),
    st.lists(st.floats(0.01, 3), min_size=3, max_size=3),
)
def test_no_other_choice_gives_more_tokens_a_second(
    requests: list[tuple[list[float], int]], base: float, start_depth: tuple[float, float], draft: list[float]
) -> None:
    survival = np.array([conditional for conditional, _ in requests]).cumprod(axis=1)
    most = np.array([limit for _, limit in requests])
    costs = round_costs(draft[: len(requests)], base, *start_depth)
    chosen = choose_drafts(survival, most, costs)
    assert ((chosen >= 0) & (chosen <= most)).all()
    every = itertools.product(*(range(limit + 1) for limit in most))
    best = max(rate(survival, k, costs) for k in every)
    if chosen.any():
        assert rate(survival, chosen.tolist(), costs) == pytest.approx(best)
    else:
        assert rate(survival, chosen.tolist(), costs) >= best / (LEAST_GAIN + 1e-9)


@pytest.mark.parametrize("free", [3, 6])
def test_no_more_drafts_than_rows_that_cost_little(free: int) -> None:
    survival = np.full((4, 8), 0.8).cumprod(axis=1)
    more = np.maximum(np.arange(33) - free, 0) * 10.0
    costs = RoundCosts(1.0, 0.0, np.full(4, 0.01), 0.0, more)
    assert choose_drafts(survival, np.full(4, 8), costs).sum() == free


def test_a_higher_cost_per_draft_lowers_k() -> None:
    survival = np.full((4, 8), 0.8).cumprod(axis=1)
    most = np.full(4, 8)

    def total(draft: Sequence[float], depth: float) -> int:
        return int(choose_drafts(survival, most, round_costs(draft, depth=depth)).sum())

    assert total([0.001] * 4, 0.0) == 32
    assert 32 > total([0.05] * 4, 0.0) > total([0.1] * 4, 0.0) > total([0.5] * 4, 0.0) == 0
    assert total([0.001] * 4, 0.001) > total([0.001] * 4, 0.3) > 0
    # The request with the longest context gets fewer.
    costs = round_costs([0.05, 0.05, 0.2, 0.05])
    chosen = choose_drafts(survival, most, costs)
    assert chosen[2] < chosen[0] == chosen[1] == chosen[3]


def test_a_request_whose_drafts_are_accepted_gets_more_than_its_neighbour() -> None:
    rates = AcceptanceRates(8)
    good, bad = rates.new(), rates.new()
    for _ in range(40):
        rates.verified(good, 4, 4)
        rates.verified(bad, 4, 0)
    survival = rates.survival([good, bad, None])
    assert survival[0, 0] > survival[2, 0] + 0.2 > survival[1, 0] + 0.4
    assert survival[0, 0] > 0.8
    assert survival[1, 0] < 0.4
    assert (np.diff(survival, axis=1) <= 0).all()
    chosen = choose_drafts(survival[:2], np.full(2, 8), round_costs([0.2, 0.2]))
    assert chosen[0] > chosen[1]


def test_positions_that_were_never_tried_are_as_good_as_the_one_before() -> None:
    rates = AcceptanceRates(4)
    assert rates.survival([None])[0, 0] == FIRST_GUESS
    one = rates.new()
    for _ in range(200):
        rates.verified(one, 2, 1)  # the first draft always, the second never
    first, second, third, _ = rates.survival([None])[0]
    assert first > 0.9
    assert second < 0.1 * first
    assert third < 0.1 * second


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

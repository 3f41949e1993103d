"""How a step's tokens are shared among prompts, who waits for whom, and how long streams wait for prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.engine.prompt_budget import PromptBudget
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.sampling_params import SamplingParams
from testkit.arrivals import arriving
from testkit.engines import random_prompt, stepped
from testkit.engines import request as request_of
from tests.kv.test_cache import Memory

BUDGET = 16
_BOUND_S = 0.2


def step(scheduler: Scheduler) -> dict[Request, int]:
    """Compute the rows of one step. Returns their numbers. A request ends with its prompt."""
    rows = {one.request: one.num_rows for one in scheduler.schedule()}
    for request, num in rows.items():
        request.num_computed += num
        if not request.is_prefilling:
            scheduler.remove(request)
            scheduler.cache.release(request.kv)
    return rows


def new_scheduler() -> Scheduler:
    return Scheduler(Memory(num_pages=400).cache, BUDGET, 64)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = new_scheduler()
    long = arriving(scheduler, 160)
    assert step(scheduler) == {long: BUDGET}, "alone it gets all"
    short = [arriving(scheduler, 3), arriving(scheduler, 4)]
    assert step(scheduler) == {long: 9, short[0]: 3, short[1]: 4}, "it gets what they leave"
    assert step(scheduler) == {long: BUDGET}
    other, short = arriving(scheduler, 160), [arriving(scheduler, 5)]
    assert step(scheduler) == {long: 11, short[0]: 5}, "it does not wait for those that wait before it either"
    assert list(scheduler.waiting) == [other], "long ones run one after the other"


def test_a_prompt_that_fits_into_no_step_shares_with_a_longer_one() -> None:
    scheduler = new_scheduler()
    long, middle = arriving(scheduler, 160), arriving(scheduler, 40)
    assert step(scheduler) == {long: BUDGET}
    assert step(scheduler) == {long: 8, middle: 8}
    short = arriving(scheduler, 3)
    assert step(scheduler) == {long: 8, short: 3, middle: 5}, "those that fit come first"
    other = arriving(scheduler, 30)
    assert step(scheduler) == {long: 8, middle: 8}, "one at a time, so that few hold pages"
    while middle.is_prefilling:
        step(scheduler)
    assert step(scheduler) == {long: 8, other: 8}


def test_a_prompt_that_was_passed_over_is_next_whatever_comes() -> None:
    """Shorter ones that come all the time share with it, and no more."""
    scheduler = new_scheduler()
    first = arriving(scheduler, 160)
    step(scheduler)
    old, steps = arriving(scheduler, 150), 0
    while old.is_prefilling:
        arriving(scheduler, 20)
        rows = step(scheduler)
        assert first not in rows or rows[first] >= BUDGET // 2
        steps += first not in rows
    assert steps <= 150 // (BUDGET // 2) + 1


def test_a_better_class_goes_first_whatever_its_length() -> None:
    scheduler = new_scheduler()
    long = arriving(scheduler, 60)
    step(scheduler)
    worse, better = arriving(scheduler, 20, priority=1), arriving(scheduler, 80, priority=-1)
    assert step(scheduler) == {better: BUDGET}
    scheduler.remove(better)
    scheduler.cache.release(better.kv)
    assert step(scheduler) == {long: BUDGET}, "a worse class waits"
    assert list(scheduler.waiting) == [worse]


def test_prompts_beside_decodes_are_bounded() -> None:
    scheduler = Scheduler(Memory(num_pages=400).cache, BUDGET, 64, 5)
    decoding = arriving(scheduler, 12)
    scheduler.schedule()
    decoding.num_computed = 12
    decoding.token_ids.append(7)
    long, short = arriving(scheduler, 160), arriving(scheduler, 4)
    sizes = []
    for _ in range(3):
        sizes.append({rows.request: rows.num_rows for rows in scheduler.schedule()})
        for request, num in sizes[-1].items():
            request.num_computed += num * (request is not decoding)
    assert sizes == [{decoding: 1, long: 5}, {decoding: 1, long: 3, short: 2}, {decoding: 1, long: 3, short: 2}]
    for request in (decoding, short):
        scheduler.remove(request)
    assert step(scheduler) == {long: BUDGET}, "without decodes the step is whole"


def test_a_long_prompt_that_is_held_is_short() -> None:
    memory = Memory(num_pages=400)
    scheduler = Scheduler(memory.cache, BUDGET, 64)
    long, known = arriving(scheduler, 160), arriving(scheduler, 60)
    memory.run([*known.token_ids])
    rows = step(scheduler)
    assert rows == {long: BUDGET}
    rows = step(scheduler)
    assert known.num_cached >= 54
    assert rows == {long: BUDGET - rows[known], known: 60 - known.num_cached}


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=12))
@example([(1, 0), (42, 0), (7, 0), (16, 0), (14, 2)])  # one that fits is older than a running one
def test_no_prompt_starves_and_no_token_of_a_step_is_wasted(arrivals: list[tuple[int, int]]) -> None:
    scheduler = new_scheduler()
    requests: list[Request] = []
    arrivals = [*arrivals, (1, 200)]
    for length, num_steps in arrivals:
        requests.append(arriving(scheduler, length))
        for _ in range(num_steps):
            unfinished = [request for request in requests if request.is_prefilling]
            oldest_long = next((r for r in unfinished if r.prefill_len - r.num_computed > BUDGET), None)
            first = unfinished[0] if unfinished else None
            left = sum(request.prefill_len - request.num_computed for request in unfinished)
            rows = step(scheduler)
            assert sum(rows.values()) == min(BUDGET, left)
            if first is not None and first is oldest_long:
                assert rows[first] >= BUDGET // 2
            elif first is not None:
                assert not first.is_prefilling, "the oldest, which fits, is computed whole"
    assert not any(request.is_prefilling for request in requests)


def steps_of(budget: PromptBudget, prompt: int, decode_s: float, token_s: float) -> list[tuple[int, float]]:
    """Tokens and seconds of the steps of a prompt beside decodes, on an engine with these costs."""
    found: list[tuple[int, float]] = []
    while prompt:
        tokens = min(prompt, budget.num_tokens)
        seconds = decode_s + token_s * tokens
        budget.computed(tokens, True, seconds)
        found.append((tokens, seconds))
        prompt -= tokens
    return found


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.01, 0.001), (0.05, 0.0002), (0.002, 0.003)])
def test_a_step_with_decodes_is_as_long_as_the_bound_and_no_longer(decode_s: float, token_s: float) -> None:
    budget = PromptBudget(_BOUND_S)
    budget.computed(0, True, decode_s)
    budget.computed(100, False, 100 * token_s)
    *whole, _ = steps_of(budget, 4000, decode_s, token_s)
    for tokens, seconds in whole:
        assert seconds <= _BOUND_S < seconds + 32 * token_s + 1e-9
        assert tokens % 32 == 0


def test_an_engine_that_has_measured_nothing_learns_from_its_first_chunk() -> None:
    (first, _), (second, _), *rest, _ = steps_of(PromptBudget(_BOUND_S), 4000, 0.01, 0.002)
    assert (first, second) == (256, 96)
    # What decodes take is not known yet, and counts twice.
    assert {tokens for tokens, _ in rest} == {64}


def test_more_decodes_than_before_take_from_the_prompts() -> None:
    budget = PromptBudget(_BOUND_S)
    budget.computed(0, True, 0.01)
    budget.computed(1000, False, 1.0)
    steps = steps_of(budget, 3000, 0.09, 0.001)
    assert steps[0][1] > _BOUND_S
    assert {seconds for _, seconds in steps[1:-1]} == {0.186}


def test_decodes_that_are_longer_than_the_bound_do_not_stop_prompts() -> None:
    budget = PromptBudget(_BOUND_S)
    for _ in range(3):
        budget.computed(0, True, 0.5)
    budget.computed(1000, False, 1.0)
    assert {tokens for tokens, _ in steps_of(budget, 480 * 5, 0.5, 0.001)} == {480}
    for _ in range(9):
        budget.computed(64, True, 10.0)
    assert budget.num_tokens == 32


def test_one_disturbed_step_counts_little() -> None:
    budget = PromptBudget(_BOUND_S)
    budget.computed(1000, False, 1.0)
    before = budget.num_tokens
    budget.computed(before, True, 30.0)
    assert budget.num_tokens >= before // 2
    budget.computed(3, False, 3.0)
    assert budget.num_tokens >= before // 2, "the time of few rows is not that of their number"


def test_a_limit_of_tokens_holds_too() -> None:
    budget = PromptBudget(_BOUND_S, 20)
    assert budget.num_tokens == 20
    budget.computed(1000, False, 1.0)
    assert budget.num_tokens == 20


def test_a_stream_waits_no_longer_than_the_bound() -> None:
    with stepped(speculative_config=None, kv_cache_memory=8 << 20, max_decode_gap_s=_BOUND_S) as engine:
        core: Any = engine.core
        clock, execute = SimpleNamespace(now=0.0), core.executor.execute

        def timed(plan: Any, written: Any = None) -> Any:
            clock.now += 0.01 + 0.001 * len(plan.rows.token_ids)
            return execute(plan, written)

        core.executor.execute = timed
        core.clock = SimpleNamespace(monotonic=lambda: clock.now)
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        stream = engine.add(request_of("stream", random_prompt(48), params))
        engine.step()
        other = engine.add(request_of("other", random_prompt(700), params))
        gaps = []
        while not other.token_ids:
            began, known = clock.now, len(stream.token_ids)
            engine.step()
            assert len(stream.token_ids) == known + 1
            gaps.append(clock.now - began)
        assert max(gaps) <= _BOUND_S
        assert len(gaps) == 5, "160 tokens each"

"""How a step's tokens are shared among prompts, and who waits for whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from testkit.arrivals import arriving
from tests.kv.test_cache import Memory

BUDGET = 16


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

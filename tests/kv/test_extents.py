"""Free runs of pages: every page once, merged with its neighbours, and taken in as few pieces as possible."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.extents import Extents


def runs(pages: set[int]) -> list[int]:
    """Lengths of the maximal runs of a set."""
    starts = [page for page in pages if page - 1 not in pages]
    return sorted(next(n for n in range(1, len(pages) + 1) if start + n not in pages) for start in starts)


def test_the_shortest_run_that_fits_is_taken() -> None:
    free = Extents(1, 101)
    free.take(100)
    free.add([*range(1, 21), *range(30, 35), *range(50, 58)])
    assert free.take(6) == list(range(50, 56))
    assert free.take(2) == [56, 57]
    # No run holds 22 pages: the longest goes first.
    assert free.take(22) == [*range(1, 21), 30, 31]
    assert free.num_pages == 3


def test_a_table_grows_after_its_last_page() -> None:
    free = Extents(1, 21)
    assert free.take(3) == [1, 2, 3]
    assert free.take(2) == [4, 5]
    free.add([2, 3])
    assert free.take(2, after=5) == [6, 7]
    assert free.take(1, after=1) == [2]
    # After 2 only page 3 is free, after 3 none.
    assert free.take(2, after=2) == [3, 8]
    assert free.take(1, after=3) == [9]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 20), st.randoms(use_true_random=False)), max_size=40))
def test_runs_are_those_of_the_set_of_free_pages(steps: list[tuple[int, int, object]]) -> None:
    free, model, taken = Extents(1, 20), set(range(1, 20)), list[int]()
    for count, after, random in steps:
        if count <= len(model):
            longest = max(runs(model), default=0)
            after = -1 if after in model else after  # a table's own page is not free
            pages = free.take(count, after if after > 0 else None)
            assert len(set(pages)) == count
            assert set(pages) <= model
            if after > 0 and count and after + 1 in model:
                assert pages[0] == after + 1
            elif count <= longest:
                assert pages == list(range(pages[0], pages[0] + count)) if pages else not count
            model -= set(pages)
            taken += pages
        else:
            random.shuffle(taken)  # type: ignore[attr-defined]
            back, taken = taken[: len(taken) // 2 + 1], taken[len(taken) // 2 + 1 :]
            free.add(back)
            model |= set(back)
        assert free.num_pages == len(model)
        assert sorted(n for n, starts in free._by_length.items() for _ in starts) == runs(model)
        assert free._lengths == sorted(free._by_length)

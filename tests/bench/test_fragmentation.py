"""Runs per prompt in page pools that are fresh, have served for long, or are maximally fragmented."""

from __future__ import annotations

import statistics

import pytest

from baton.bench.fragmentation import Churn, churn, fragmented_tables
from baton.errors import ConfigError
from baton.kv.page_pool import PagePool
from tests.bench.runs import num_runs

PAGES = 2001


def mean_runs(load: Churn) -> float:
    fresh = churn(PagePool(PAGES, 1, enable_caching=load.caching), load)
    assert len(fresh) == load.requests
    return statistics.fmean(num_runs(sorted(pages)) for pages in fresh[load.requests // 2 :])


@pytest.mark.parametrize("grows", [False, True])
def test_prompts_lie_in_few_runs_after_long_service(grows: bool) -> None:
    # Without a prefix cache the free pages are one run; with it they are what is evicted. A free list used from its end
    # gives 35 and 71, eviction page by page 20 and 61.
    assert mean_runs(Churn(requests=600, grows=grows, caching=False, hits=0.0)) < 1.2
    assert mean_runs(Churn(requests=600, grows=grows)) < 8.0


def test_tables_of_each_kind() -> None:
    fresh, again = fragmented_tables("fresh", PAGES, 128, 2)
    assert num_runs(fresh) == num_runs(again) == 1
    (worst,) = fragmented_tables("full", PAGES, 128, 1)
    assert num_runs(sorted(worst)) == len(set(worst)) == 128
    assert worst != sorted(worst)
    assert all(1 < num_runs(sorted(table)) < 32 for table in fragmented_tables("churned", PAGES, 128, 3))
    with pytest.raises(ConfigError, match="fragmentation"):
        fragmented_tables("some", PAGES, 128, 1)


def test_runs_are_counted() -> None:
    assert [num_runs(pages) for pages in ([], [4], [4, 5, 6], [4, 6, 5], [1, 2, 9, 10])] == [0, 1, 1, 3, 2]

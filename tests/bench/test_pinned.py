"""The parts of the benchmarks under load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton.bench.load import LoadRun
from baton.bench.load_figures import RequestOutcome
from baton.kv import page_pool
from benchmarks.serving.pinned import Scattered, figures, parse_cores, pin
from tests.bench.runs import num_runs


def test_scattered_pools_hand_out_every_page_once_and_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "Extents", Scattered)
    pages = page_pool.PagePool(1001, 1)
    table = pages.allocate(200)
    assert num_runs(table) > 190
    rest = pages.allocate(800)
    assert sorted(table + rest) == list(range(1, 1001))
    pages.release(table)
    again = pages.allocate(200)
    assert sorted(again) == sorted(table)
    assert again != table


def test_failures_are_counted_by_kind() -> None:
    outcomes = [
        RequestOutcome(3, ttft=0.1, latency=0.1, output_len=1),
        RequestOutcome(3, error="HTTP 429: full"),
        RequestOutcome(3, error="x"),
    ]
    found = figures(LoadRun("m", outcomes, 2.0, None, None), {"ttft": 50.0})
    assert found["errors_by_kind"] == {"429": 1, "x": 1}
    assert (found["completed"], found["failed"], found["request_goodput"]) == (1, 2, 0.0)


def test_a_process_is_kept_to_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pin(child.pid, [core])
        assert os.sched_getaffinity(child.pid) == {core}
    finally:
        child.communicate()
    with pytest.raises(SystemExit, match="cores"):
        parse_cores("4095")

"""Real engines are killed and stopped during streams: every answer stays exact, and nothing is left behind."""

from __future__ import annotations

import os

import pytest

from benchmarks.faults.chaos import ChaosConfig, run_chaos
from testkit.processes.leftovers import orphaned_segments

SOON_S = (0.02, 0.2)
# Bytes of KV per engine: enough for two of the longest requests.
SMALL = 4 << 20
pytestmark = pytest.mark.usefixtures("forks")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        ChaosConfig(requests=20, seed=11, mode="push", integrity="full", pause_s=SOON_S),
        ChaosConfig(
            requests=14, seed=2, mode="pull", pause_s=SOON_S, routers=2, prefix_store=True, kv_cache_memory=SMALL
        ),
    ],
    ids=lambda config: config.mode,
)
def test_no_stream_notices_that_engines_die(config: ChaosConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    temporary = os.environ.get("TMPDIR")
    report = run_chaos(config)
    assert os.environ.get("TMPDIR") == temporary, "a later test of this process would use a removed directory"
    # More streams than configured, if they would end before both roles had a fault.
    assert report.num_exact == report.num_requests >= config.requests, report.table()
    assert not report.leaks, report.table()
    assert report.num_exact_after == report.num_after > 0, report.table()
    assert report.num_exact_beside == report.num_beside, report.table()
    assert (report.num_beside > 0) == (config.routers > 1), report.table()
    assert report.num_orphans > 0, "the router died under streams"
    assert {role for role, _ in report.faults} == {"prefill", "decode"}, report.table()
    assert report.ok
    assert not orphaned_segments()

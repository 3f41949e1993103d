"""Real engines are killed and halted under streams: every answer stays exact, and nothing is left behind."""

from __future__ import annotations

import pytest
from leftovers import orphaned_segments

from baton.bench.chaos import ChaosConfig, run_chaos

# So soon that a fast machine, too, is still serving when the first fault of either role comes.
SOON_S = (0.02, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        ChaosConfig(requests=24, seed=1, mode="push", integrity="full", pause_s=SOON_S),
        ChaosConfig(requests=24, seed=2, mode="pull", pause_s=SOON_S),
    ],
    ids=lambda config: config.mode,
)
def test_no_stream_notices_that_engines_die(config: ChaosConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = run_chaos(config)
    assert report.num_exact == report.num_requests == config.requests, report.table()
    assert not report.leaks, report.table()
    assert report.num_exact_after == report.num_after > 0, report.table()
    assert report.num_orphans > 0, "the router died under streams"
    assert {role for role, _ in report.faults} == {"prefill", "decode"}, report.table()
    assert not orphaned_segments()

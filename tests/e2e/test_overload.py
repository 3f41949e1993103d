"""More requests at once than fit, and clients that cost too much: every answer is exact or 429."""

from __future__ import annotations

import pytest

from benchmarks.faults.overload import OverloadConfig, run_overload
from testkit.processes.leftovers import orphaned_segments

pytestmark = pytest.mark.usefixtures("forks")


@pytest.mark.slow
def test_under_overload_answers_are_exact_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = OverloadConfig(
        requests=60,
        room=4,
        queued=4,
        cases=6,
        max_tokens=16,
        streams=12,
        silent=6,
        leaving=10,
        slow=5,
        unread=0,
        deflated=0,
    )
    report = run_overload(config)
    assert not report.others, report.table()
    assert report.num_exact + report.num_refused == config.requests
    assert report.num_exact >= config.queued, report.table()
    assert report.num_refused > 0, report.table()
    assert len(report.memory) == 3
    for name, (before, peak, _) in report.memory.items():
        assert peak < before + 256, (name, report.table())
    assert not orphaned_segments()

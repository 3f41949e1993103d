"""Histograms, and those that an engine keeps of its handoffs."""

from __future__ import annotations

from baton.distribution import Distribution
from baton.engine.metrics import EngineMetrics
from baton.openai.metrics import RowCollector, exposed


def test_what_lies_at_or_below_each_bound() -> None:
    some = Distribution((1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 4.1):
        some.observe(value)
    assert some.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("4.0", 4.0), ("+Inf", 5.0)]
    assert (some.count, some.total) == (5, 11.1)
    both = Distribution.sum_of([some, some])
    assert both.buckets() == [("1.0", 4.0), ("2.0", 6.0), ("4.0", 8.0), ("+Inf", 10.0)]
    assert (both.count, both.total) == (10, 22.2)


def test_they_are_shown_as_prometheus_reads_them() -> None:
    metrics = EngineMetrics()
    metrics.register_to_commit.observe(0.003)
    metrics.agent.copies.runs.observe(7)
    metrics.agent.copies.bytes["draft"] += 512
    text = exposed(RowCollector(metrics.collect_rows).collect()).decode()
    assert 'baton:handoff_register_to_commit_seconds_bucket{le="0.002"} 0.0' in text
    assert 'baton:handoff_register_to_commit_seconds_bucket{le="0.005"} 1.0' in text
    assert "baton:handoff_register_to_commit_seconds_sum 0.003" in text
    assert 'baton:handoff_copy_runs_bucket{le="8.0"} 1.0' in text
    assert 'baton:handoff_copied_bytes_total{group="draft"} 512.0' in text
    assert "baton:handoff_commit_to_first_step_seconds_count 0.0" in text

"""Histograms, and an engine's histograms of its handoffs."""

from __future__ import annotations

from baton.engine.async_engine import _cache_config
from baton.engine.config import EngineConfig
from baton.engine.metrics import EngineMetrics
from baton.histogram import Histogram
from baton.openai.client import read_samples
from baton.openai.http.metrics import RowCollector, exposition_text, with_vllm_names


def test_buckets_count_values_at_or_below_their_bound() -> None:
    some = Histogram((1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 4.1):
        some.observe(value)
    assert some.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("4.0", 4.0), ("+Inf", 5.0)]
    assert (some.count, some.total) == (5, 11.1)
    both = Histogram.sum_of([some, some])
    assert both.buckets() == [("1.0", 4.0), ("2.0", 6.0), ("4.0", 8.0), ("+Inf", 10.0)]
    assert (both.count, both.total) == (10, 22.2)


def test_metrics_have_vllms_names_too() -> None:
    """Read back as the router does, which scrapes its engines."""
    metrics = EngineMetrics()
    metrics.prompt_came(100, 64, "local_compute")
    metrics.prompt_came(50, 0, "external_kv_transfer")
    metrics.step_tokens.observe(36)
    metrics.inference_time.observe(0.3)
    metrics.cache_config = _cache_config(EngineConfig(model="m", block_size="32,draft=8"), 6400)
    rows = RowCollector(lambda: with_vllm_names(metrics.collect_rows(), "m"))
    samples = read_samples(exposition_text(rows.collect()).decode())
    found = {(sample.name, sample.labels.get("source")): sample for sample in samples}
    for source, count in (("local_compute", 36), ("local_cache_hit", 64), ("external_kv_transfer", 50)):
        assert found["vllm:prompt_tokens_by_source_total", source].value == count
    assert found["vllm:iteration_tokens_total_sum", None].value == 36
    assert found["vllm:request_inference_time_seconds_count", None].value == 1
    config = found["vllm:cache_config_info", None]
    assert (config.value, config.labels["block_size"], config.labels["num_gpu_blocks"]) == (1.0, "32", "200")


def test_they_are_shown_as_prometheus_reads_them() -> None:
    metrics = EngineMetrics()
    metrics.register_to_commit.observe(0.003)
    metrics.agent.copies.runs.observe(7)
    metrics.agent.copies.bytes["draft"] += 512
    text = exposition_text(RowCollector(metrics.collect_rows).collect()).decode()
    assert 'baton:handoff_register_to_commit_seconds_bucket{le="0.002"} 0.0' in text
    assert 'baton:handoff_register_to_commit_seconds_bucket{le="0.005"} 1.0' in text
    assert "baton:handoff_register_to_commit_seconds_sum 0.003" in text
    assert 'baton:handoff_copy_runs_bucket{le="8.0"} 1.0' in text
    assert 'baton:handoff_copied_bytes_total{group="draft"} 512.0' in text
    assert "baton:handoff_commit_to_first_step_seconds_count 0.0" in text

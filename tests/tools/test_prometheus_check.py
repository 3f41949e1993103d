"""The metrics of vLLM's dashboards are exposed, by a router or by an engine."""

from __future__ import annotations

from baton.engine.metrics import EngineMetrics
from baton.openai.http.metrics import FrontMetrics, RowCollector, exposition_text, with_vllm_names
from testkit.servers.fake_serving import load_of
from tools.prometheus_check import metric_names, queries


def test_every_metric_of_the_queries_is_exposed() -> None:
    front, engine = FrontMetrics(), EngineMetrics()
    front.of_model("m").ended["stop"] += 1
    engine.verified(3, 1)
    engine.load = load_of(0)
    front.registry.register(RowCollector(lambda: with_vllm_names(engine.collect_rows(), "m")))
    text = exposition_text(front.registry.collect()).decode()
    shown = {line.partition("{")[0] for line in text.splitlines() if 'model_name="m"' in line}
    assert metric_names() - shown == set()


def test_queries_ask_for_one_model() -> None:
    found = queries('a"b')
    assert all(r'model_name="a\"b"' in query for query in found.values())
    assert all(any(name in query for query in found.values()) for name in metric_names())

"""Dashboards and alert rules ask for metrics that exist. `tools.prometheus_check` asks a real Prometheus server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from baton.engine.metrics import EngineMetrics
from baton.openai.http.metrics import with_vllm_names
from testkit.servers.fake_serving import load_of
from testkit.servers.fleets import Cluster, complete
from tests.router.test_acceptance import named
from tools.grafana import DASHBOARDS, FOLDER, metric_names, text_of
from tools.prometheus_check import alert_queries, panel_queries, scaling_queries


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_dashboards_are_current(name: str) -> None:
    assert (FOLDER / "grafana" / f"{name}.json").read_text() == text_of(name), "python -m tools.grafana"


def documented_queries() -> dict[str, str]:
    """The PromQL of the page for operators."""
    page = (FOLDER.parents[1] / "docs" / "operations.md").read_text()
    spans = [span for line in page.splitlines() for span in re.findall(r"`([^`]+)`", line)]
    queries = [span for span in spans if re.match(r"(sum|histogram_quantile)\b.*\(", span)]
    assert len(queries) >= 8
    return {query: query for query in queries}


async def test_every_metric_of_the_queries_exists(directory: Path) -> None:
    engine = EngineMetrics()
    engine.load = load_of(0)
    engine.verified(3, 1)
    engine.recoveries["retry"], engine.refused_tickets = 1, 0
    rows = {(name, kind) for name, kind, *_ in with_vllm_names(engine.collect_rows(), "model")}
    shown = {f"{name}_total" if kind == "counter" else name for name, kind in rows}
    shown |= {f"{name}_{part}" for name, kind in rows if kind == "histogram" for part in ("bucket", "sum", "count")}
    cluster = named(Cluster(directory, num_prefill=1, num_decode=2))
    cluster.decodes[0].fail = "dies"
    async with cluster.run() as (url, session):
        for _ in range(2):
            assert (await complete(session, url))[0] == 200
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
    shown |= {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    scaling = scaling_queries()
    assert len(scaling) == 4
    queries = {**panel_queries(), **alert_queries(), **scaling, **documented_queries()}
    missing = {name: asked - shown for name, query in queries.items() if (asked := metric_names(query)) - shown}
    assert missing == {}
    assert len(queries) > 40


def test_the_compose_file_mounts_files_that_exist() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", ())]
    assert mounts
    assert all((FOLDER / mount).exists() for mount in (*mounts, services["baton"]["extends"]["file"]))
    scrape = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scrape["job_name"] == "baton", "an alert rule names the job"

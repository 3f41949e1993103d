"""Let a Prometheus server scrape a running deployment, and run the queries of vLLM's example dashboards, of Baton's own
dashboards, of its alert rules (examples/observability), whose thresholds are left out, and of its scaling objects.

    python -m tools.prometheus_check [MODEL] [--prometheus PATH]

The server comes from the distribution's package, unpacked in the user's cache (`apt-get download prometheus`). Prints
each query with the number of its series and the largest value. Ends with status 1 if a query has no data, or the server
cannot evaluate an alert rule.

Queries: those of the dashboards in vLLM's examples/observability, panel by panel, by the names of its metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
import yaml

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from benchmarks.vllm.servers import free_port
from tools.grafana import FOLDER

DEPLOY = FOLDER.parent / "deploy"

WINDOW = "20s"
_LOAD_S = 12.0
_START_S = 30.0
_HISTOGRAMS = {
    "E2E request latency": "e2e_request_latency_seconds",
    "Inter token latency": "inter_token_latency_seconds",
    "Time to first token": "time_to_first_token_seconds",
    "Time per output token": "request_time_per_output_token_seconds",
}
_RATES = {
    "Prompt tokens": "prompt_tokens_total",
    "Generation tokens": "generation_tokens_total",
    "Queue time": "request_queue_time_seconds_sum",
    "Prefill time": "request_prefill_time_seconds_sum",
    "Decode time": "request_decode_time_seconds_sum",
    "Max generation tokens": "request_max_num_generation_tokens_sum",
    "Accepted tokens": "spec_decode_num_accepted_tokens_total",
    "Draft tokens": "spec_decode_num_draft_tokens_total",
    "Drafts": "spec_decode_num_drafts_total",
    "Preemptions": "num_preemptions_total",
    "Prefix cache queries": "prefix_cache_queries_total",
    "Prefix cache hits": "prefix_cache_hits_total",
}
_GAUGES = {
    "Running": "num_requests_running",
    "Waiting": "num_requests_waiting",
    "Cache utilization": "kv_cache_usage_perc",
}
_SUMS = {
    ("Prompt length", "le"): "request_prompt_tokens_bucket",
    ("Generation length", "le"): "request_generation_tokens_bucket",
    ("Finish reason", "finished_reason"): "request_success_total",
    ("Accepted by position", "position"): "spec_decode_num_accepted_tokens_per_pos_total",
}


def queries(model: str) -> dict[str, str]:
    """The queries by panel, for the model of this name."""

    def of(name: str) -> str:
        return f"vllm:{name}{{model_name={json.dumps(model)}}}"

    def rate(name: str) -> str:
        return f"rate({of(name)}[{WINDOW}])"

    found = {f"{panel}, rate": rate(name) for panel, name in _RATES.items()}
    found |= {panel: of(name) for panel, name in _GAUGES.items()}
    for panel, name in _HISTOGRAMS.items():
        for quantile in (0.5, 0.9, 0.95, 0.99):
            found[f"{panel}, P{quantile * 100:g}"] = (
                f"histogram_quantile({quantile}, sum by(le) ({rate(name + '_bucket')}))"
            )
        found[f"{panel}, mean"] = f"{rate(name + '_sum')} / {rate(name + '_count')}"
    for (panel, label), name in _SUMS.items():
        found[panel] = f"sum by({label}) (increase({of(name)}[{WINDOW}]))"
    accepted, proposed, drafts = (
        f"sum({rate(f'spec_decode_num_{what}_total')})" for what in ("accepted_tokens", "draft_tokens", "drafts")
    )
    found["Draft acceptance rate"] = f"{accepted} / ({proposed} > 0)"
    found["Acceptance length"] = f"1 + {accepted} / ({drafts} > 0)"
    return found


def panel_queries() -> dict[str, str]:
    """The queries of Baton's dashboards, by dashboard and panel, from the files."""
    found = {}
    for file in sorted((FOLDER / "grafana").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{file.stem}: {panel['title']} {target['refId']}"] = target["expr"]
    return found


def alert_queries() -> dict[str, str]:
    """What the alert rules compare, by rule: their expressions without thresholds."""
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    return {f"alert: {rule['alert']}": re.sub(r" (?:==|>) [\d.]+", "", rule["expr"]) for rule in rules}


def scaling_queries() -> dict[str, str]:
    """What KEDA asks, by manifest and object."""
    found = {}
    for file in sorted(DEPLOY.glob("kubernetes-*.yaml")):
        for one in yaml.safe_load_all(file.read_text()):
            if one["kind"] == "ScaledObject":
                query = one["spec"]["triggers"][0]["metadata"]["query"]
                found[f"{file.stem}: {one['metadata']['name']}"] = query
    return found


def metric_names() -> set[str]:
    names = {*_RATES.values(), *_GAUGES.values(), *_SUMS.values()}
    names |= {f"{name}_{part}" for name in _HISTOGRAMS.values() for part in ("bucket", "sum", "count")}
    return {f"vllm:{name}" for name in names}


def installed() -> Path:
    """The server's binary from the distribution's package, downloaded once. Raises `CalledProcessError`."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "prometheus"
    program = folder / "usr" / "bin" / "prometheus"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as there:
            subprocess.run(["apt-get", "download", "prometheus"], cwd=there, check=True, stdout=subprocess.DEVNULL)
            (package,) = Path(there).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    return program


@contextlib.contextmanager
def running(program: Path, target: str) -> Iterator[str]:
    """Run a server with the example's configuration and rules that scrapes `target` once a second. Yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"127.0.0.1:{free_port()}"
        example = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        (job,) = example["scrape_configs"]
        job["static_configs"] = [{"targets": [urllib.parse.urlsplit(target).netloc]}]
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = Path(folder) / "prometheus.yml"
        config.write_text(json.dumps({**example, "global": every, "rule_files": [str(FOLDER / "alerts.yaml")]}))
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen([program, *flags], stdout=log, stderr=log)
        try:
            _wait_until_ready(process, f"http://{address}")
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the Prometheus server did not start")
        time.sleep(0.1)


def ask(url: str, query: str) -> list[Mapping[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10) as answer:
        found: list[Mapping[str, Any]] = json.load(answer)["data"]["result"]
    return found


def rules_with_errors(url: str) -> dict[str, str]:
    """The server's alert rules that it could not evaluate, with its errors."""
    with urllib.request.urlopen(f"{url}/api/v1/rules", timeout=10) as answer:
        groups = json.load(answer)["data"]["groups"]
    return {
        rule["name"]: f"{rule['health']}: {rule.get('lastError', '')}"
        for group in groups
        for rule in group["rules"]
        if rule["health"] != "ok"
    }


async def _load(url: str, seconds: float) -> None:
    """Load from several clients at once for `seconds`."""
    until = time.monotonic() + seconds

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < until:
            body = {"prompt": f"def f{number}(x):" * (4 + number), "max_tokens": 24, "temperature": 0}
            await stream_completion(session, url, body)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(number, session) for number in range(3)))


def main(
    model: Annotated[str, typer.Argument()] = "models/baton-demo-llama",
    draft_model: str = "models/baton-demo-eagle3",
    prometheus: Annotated[Path | None, typer.Option(help="the server's program")] = None,
) -> None:
    """Print the result of each query."""
    speculation = json.dumps({"method": "eagle3", "model": draft_model, "num_speculative_tokens": 3})
    flags = ["--speculative-config", speculation, "--served-model-name", "model"]
    missing = 0
    with (
        Deployment(model, prefill=1, decode=1, router=True, engine_flags=flags) as deployment,
        running(prometheus or installed(), deployment.url) as server,
    ):
        asyncio.run(_load(deployment.url, _LOAD_S))
        time.sleep(1.5)
        asked = {**queries("model"), **panel_queries(), **alert_queries(), **scaling_queries()}
        rules = [str((prometheus or installed()).with_name("promtool")), "check", "rules", str(FOLDER / "alerts.yaml")]
        subprocess.run(rules, check=True)
        for panel, query in asked.items():
            query = query.replace("$__rate_interval", WINDOW)
            series = ask(server, query)
            missing += not series
            largest = max((float(one["value"][1]) for one in series), default=None)
            shown = "no data" if largest is None else f"{largest:g}"
            print(f"{panel:48} {len(series):3} series  {shown}")
        errors = rules_with_errors(server)
    print(f"{len(asked) - missing} of {len(asked)} queries return data; alert rules with errors: {errors or 'none'}")
    raise typer.Exit(1 if missing or errors else 0)


if __name__ == "__main__":
    typer.run(main)

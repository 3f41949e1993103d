"""Write Baton's Grafana dashboards, examples/observability/grafana/*.json, from the panels below.

python -m tools.grafana
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "observability"
# Title, unit, legend and query; several (legend, query) make several lines.
Panel = tuple[str, str, tuple[tuple[str, str], ...]]
_RATE = "[$__rate_interval]"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _quantiles(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """Quantiles of a histogram, by these labels too."""
    labels, shown = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        (
            f"p{quantile * 100:g}{shown}",
            f"histogram_quantile({quantile}, sum by ({labels}) (rate({name}_bucket{_RATE})))",
        )
        for quantile in (0.5, 0.9, 0.99)
    )


def _rate(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    grouped = f"sum by ({by}) (rate({name}_total{_RATE}))" if by else f"sum(rate({name}_total{_RATE}))"
    return ((f"{{{{{by}}}}}" if by else "all", grouped),)


def _or_zero(name: str, by: str) -> tuple[tuple[str, str], ...]:
    """The rates that are not 0, and a line at 0 while there is none."""
    none = f'label_replace(vector(0), "{by}", "none", "", "")'
    return ((f"{{{{{by}}}}}", f"sum by ({by}) (rate({name}_total{_RATE})) > 0 or {none}"),)


def _mean(name: str, by: str) -> tuple[tuple[str, str], ...]:
    labels = ", ".join(by.split())
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split())
    total, count = (f"sum by ({labels}) (rate({name}_{part}{_RATE}))" for part in ("sum", "count"))
    return ((legend, f"{total} / ({count} > 0)"),)


_PAIR = "route prefill_engine decode_engine"
DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": (
        "Baton overview",
        (
            ("Requests that ended", "reqps", _rate("vllm:request_success", "finished_reason")),
            (
                "Tokens",
                "none",
                (
                    ("prompt", f"sum(rate(vllm:prompt_tokens_total{_RATE}))"),
                    ("output", f"sum(rate(vllm:generation_tokens_total{_RATE}))"),
                ),
            ),
            ("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
            ("Time per output token", "s", _quantiles("vllm:request_time_per_output_token_seconds")),
            ("Request latency", "s", _quantiles("vllm:e2e_request_latency_seconds")),
            ("Requests by stage", "none", (("{{stage}}", "sum by (stage) (baton:router_requests_by_stage)"),)),
            ("Running on engines", "none", (("{{role}} {{engine}}", "baton:num_requests_running"),)),
            ("Waiting on engines", "none", (("{{role}} {{engine}}", "baton:num_requests_waiting"),)),
            ("KV cache in use", "percentunit", (("{{role}} {{engine}}", "baton:kv_cache_usage_perc"),)),
            (
                "Prefix cache hits",
                "percentunit",
                (
                    (
                        "hits",
                        f"sum(rate(baton:prefix_cache_hits_total{_RATE})) / "
                        f"(sum(rate(baton:prefix_cache_queries_total{_RATE})) > 0)",
                    ),
                ),
            ),
            ("Engines up", "none", (("{{role}} {{url}}", "baton:router_engine_up"),)),
            ("Preemptions", "none", _rate("baton:num_preemptions", "engine")),
        ),
    ),
    "handoff": (
        "Baton handoffs",
        (
            ("Routes", "reqps", _rate("baton:router_decisions", "why")),
            (
                "Share of handed-off attempts",
                "percentunit",
                (
                    (
                        "share",
                        f'sum(rate(baton:router_decisions_total{{why="handed_off"}}{_RATE})) / '
                        f"(sum(rate(baton:router_decisions_total{_RATE})) > 0)",
                    ),
                ),
            ),
            ("Handoffs by outcome", "reqps", _rate("baton:router_handoffs", "outcome")),
            ("Failed handoffs by reason", "reqps", _or_zero("baton:router_handoff_failures", "reason")),
            ("Recoveries by rung", "reqps", _or_zero("baton:router_recoveries", "rung")),
            ("Handoffs that run", "none", (("router", "sum(baton:router_handoffs_active)"),)),
            ("From REGISTER to COMMIT", "s", _quantiles("baton:handoff_register_to_commit_seconds")),
            ("From COMMIT to the first step", "s", _quantiles("baton:handoff_commit_to_first_step_seconds")),
            ("Copies, from post to end", "s", _quantiles("baton:handoff_transfer_seconds")),
            ("Bytes of KV", "Bps", _rate("baton:handoff_bytes")),
            ("Runs per copy", "none", _quantiles("baton:handoff_copy_runs")),
            (
                "Damaged pieces and lost leases",
                "none",
                (
                    ("bad pieces", f"sum(rate(baton:integrity_bad_pieces_total{_RATE}))"),
                    ("lost leases", f"sum(rate(baton:lost_leases_total{_RATE}))"),
                ),
            ),
        ),
    ),
    "speculation": (
        "Baton speculative decoding",
        (
            (
                "Draft acceptance rate",
                "percentunit",
                (
                    (
                        "all",
                        f"sum(rate(baton:spec_decode_num_accepted_tokens_total{_RATE})) / "
                        f"(sum(rate(baton:spec_decode_num_draft_tokens_total{_RATE})) > 0)",
                    ),
                ),
            ),
            (
                "Mean acceptance length",
                "none",
                (
                    (
                        "all",
                        f"1 + sum(rate(baton:spec_decode_num_accepted_tokens_total{_RATE})) / "
                        f"(sum(rate(baton:spec_decode_num_drafts_total{_RATE})) > 0)",
                    ),
                ),
            ),
            ("Accepted by position", "none", _rate("baton:spec_decode_num_accepted_tokens_per_pos", "position")),
            ("Accepted per first verification", "none", _mean("baton:router_first_verification_accepted", _PAIR)),
            ("Accepted per later verification", "none", _mean("baton:router_later_verifications_accepted", _PAIR)),
            ("Alarms on acceptance", "none", (("alarms", "sum(baton:router_acceptance_alarms)"),)),
        ),
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    """The JSON model of a dashboard."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"baton-{name}",
        "title": title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, title: str, unit: str, lines: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    names = sorted({name for _, query in lines for name in metric_names(query)})
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": f"From {', '.join(names)}.",
        "datasource": _SOURCE,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "noValue": "No traffic", "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for index, (legend, query) in enumerate(lines)
        ],
    }


def metric_names(query: str) -> set[str]:
    """The names of metrics in a query."""
    return set(re.findall(r"(?:baton|vllm):\w+", query))


def text_of(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / "grafana" / f"{each}.json").write_text(text_of(each))

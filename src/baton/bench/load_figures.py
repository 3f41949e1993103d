"""Statistics of a load, with the JSON keys of `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "handoff", "handoff_overhead")
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class RequestOutcome:
    """Times are in seconds. `start_time`: when it was sent, by `time.perf_counter`. `ttft`, `itl` and `latency` count
    events with a choice. `queue_time`: from due to sent. `error`: empty if it succeeded."""

    prompt_len: int
    start_time: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """None for a single token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def handoff(self) -> float | None:
        """The time from the first event with tokens to the second; contains the handoff with P/D."""
        return self.itl[0] if self.itl else None

    @property
    def handoff_overhead(self) -> float | None:
        """`handoff` minus the median of the later gaps."""
        return self.itl[0] - statistics.median(self.itl[1:]) if len(self.itl) > 1 else None


def parse_goodput(text: str | None) -> dict[str, float]:
    """Objectives such as `ttft:200 tpot:20` (milliseconds; blanks or commas between). Raises `ConfigError`."""
    objectives: dict[str, float] = {}
    for word in (text or "").replace(",", " ").split():
        name, _, value = word.partition(":")
        if name not in OBJECTIVES:
            raise ConfigError("goodput", f"{name!r} is none of {', '.join(OBJECTIVES)}")
        if name in objectives:
            raise ConfigError("goodput", f"{name} is given twice")
        objectives[name] = _number("goodput", value)
        if not objectives[name] > 0.0:
            raise ConfigError("goodput", f"{name} must be above 0 milliseconds, got {value}")
    return objectives


def parse_metrics(text: str) -> tuple[str, ...]:
    """Names such as `ttft,tpot`. Raises `ConfigError`."""
    names = tuple(filter(None, text.split(",")))
    for name in names:
        if name not in METRICS:
            raise ConfigError("percentile_metrics", f"{name!r} is none of {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Parse `50,99` and the like. Raises `ConfigError`."""
    values = tuple(_number("metric_percentiles", part) for part in text.split(",") if part)
    for value in values:
        if not 0.0 <= value <= 100.0:
            raise ConfigError("metric_percentiles", f"must be from 0 to 100, got {value}")
    return values


def load_figures(
    outcomes: Sequence[RequestOutcome],
    duration_s: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Failed requests count only in `failed` and in the lists.

    Distributions are in milliseconds, lists by request in seconds. Distributions without values are None; vLLM has 0.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    inputs, outputs = sum(o.prompt_len for o in good), sum(o.output_len for o in good)
    busiest, most = _peaks(good)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(_meets(o, goodput_ms) for o in good) / duration_s if goodput_ms else None,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.start_time for o in outcomes],
        "queue_times": [o.queue_time for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
        "max_output_tokens_per_s": busiest,
        "max_concurrent_requests": most,
    }
    for metric in metrics:
        figures |= _distribution(metric, _values(metric, good), percentiles)
    return figures


def spec_decode_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Acceptance between two reads of `spec_decode_counters`; empty if nothing was drafted."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    rounds, drafts, accepted = (grown.pop(name, 0.0) for name in ("drafts", "draft_tokens", "accepted"))
    if rounds <= 0 or drafts <= 0:
        return {}
    return {
        "spec_decode_acceptance_rate": accepted / drafts * 100,
        "spec_decode_acceptance_length": 1 + accepted / rounds,
        "spec_decode_num_drafts": int(rounds),
        "spec_decode_draft_tokens": int(drafts),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [grown[p] / rounds for p in sorted(grown, key=int)],
    }


def _values(metric: str, good: Sequence[RequestOutcome]) -> list[float]:
    if metric == "itl":
        return [gap for outcome in good for gap in outcome.itl]
    name = {"e2el": "latency", "client_queue_time": "queue_time"}.get(metric, metric)
    return [value for outcome in good if (value := getattr(outcome, name)) is not None]


def _distribution(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    named = {f"p{p:g}": p for p in percentiles}
    keys = [f"{name}_{metric}_ms" for name in ("mean", "median", "std", *named)]
    if not values:
        return dict.fromkeys(keys)
    row = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, list(named.values()))]
    return {key: float(value) * 1e3 for key, value in zip(keys, row, strict=True)}


def _meets(outcome: RequestOutcome, goodput_ms: Mapping[str, float]) -> bool:
    times = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(times[name] * 1e3 <= limit for name, limit in goodput_ms.items())


def _peaks(good: Sequence[RequestOutcome]) -> tuple[float, int]:
    """The most events with tokens, and running requests, in one second."""
    if not good:
        return 0.0, 0
    begin = min(o.start_time for o in good)
    length = math.ceil(max(o.start_time + o.latency for o in good) - begin) + 1
    events, running = np.zeros(length), np.zeros(length, dtype=int)
    for o in good:
        times = o.start_time - begin + o.ttft + np.cumsum([0.0, *o.itl])
        np.add.at(events, np.minimum(times.astype(int), length - 1), 1)
        running[int(o.start_time - begin) : int(o.start_time + o.latency - begin) + 1] += 1
    return float(events.max()), int(running.max())


def _number(field_name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(field_name, f"{text!r} is no number") from None
    if not math.isfinite(value):
        raise ConfigError(field_name, f"must be finite, got {text}")
    return value

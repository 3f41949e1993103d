"""Plots a sweep over request rates: throughput, latency and failures."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

Curves = Mapping[str, Sequence[Mapping[str, Any]]]
_DOTS_PER_INCH = 90


def check_picture(path: str) -> None:
    """Raise `ConfigError` unless `path` is a .png file and matplotlib is installed."""
    if Path(path).suffix != ".png":
        raise ConfigError("plot", f"must be a .png file, got {path!r}")
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("plot", "needs matplotlib: pip install 'baton-serve[bench]'") from None


def draw_sweep(curves: Curves, path: str) -> None:
    """Results of `baton bench serve`, by curve name, each curve in the order of its rates.

    Four plots: requests per second served within the objectives, if any, TTFT and TPOT (median and 99th percentile),
    and the share of failed requests. A missing figure leaves a gap. Raises `ConfigError`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    (served, ttft), (failed, tpot) = figure.subplots(2, 2)
    for name, results in curves.items():
        rates = [result["request_rate"] for result in results]
        has_goodput = any(result.get("request_goodput") is not None for result in results)
        key = "request_goodput" if has_goodput else "request_throughput"
        (line,) = served.plot(rates, [_number(result.get(key)) for result in results], marker="o", label=name)
        for field, metric in ((ttft, "ttft"), (tpot, "tpot")):
            for part, style in (("median", "-"), ("p99", ":")):
                values = [_number(result.get(f"{part}_{metric}_ms")) for result in results]
                field.plot(rates, values, style, color=line.get_color(), marker=".", label=f"{name}, {part}")
        parts = [100.0 * result["failed"] / max(1, result["failed"] + result["completed"]) for result in results]
        failed.plot(rates, parts, marker="o", color=line.get_color(), label=name)
    every = [result["request_rate"] for results in curves.values() for result in results]
    served.plot([0, max(every)], [0, max(every)], color="0.7", linewidth=0.8, label="all")
    objectives = any(result.get("request_goodput") is not None for results in curves.values() for result in results)
    served.set_title("served within objectives, requests/s" if objectives else "served, requests/s")
    ttft.set_title("time to first token, ms")
    tpot.set_title("time per output token, ms")
    failed.set_title("failed, %")
    failed.set_ylim(0.0, max(5.0, 1.1 * failed.get_ylim()[1]))
    ttft.set_yscale("log")
    for field in (served, ttft, failed, tpot):
        field.set_xlabel("requests/s that come")
        field.grid(visible=True, color="0.9")
    served.legend(fontsize=7)
    ttft.legend(fontsize=7)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise ConfigError("plot", f"cannot write {path}: {error.strerror}") from None


def _number(value: float | None) -> float:
    return float("nan") if value is None else value

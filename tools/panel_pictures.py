"""Draw the panels of Baton's Grafana dashboards, filled by a real run: docs/pictures/panels-*.svg.

    python -m tools.panel_pictures [--seconds 90] [--output DIR]

One prefill and two decode engines with EAGLE-3 under load, one of which is killed and started again, and a Prometheus
server that scrapes the router. Each line is that server's answer to a panel's query. The drawing is ours, in the
dashboards' order and with their titles, units and legends: Grafana itself is not needed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from baton.errors import BatonError
from benchmarks.demo import SPECULATIVE, TARGET
from tools.grafana import DASHBOARDS, Panel
from tools.prometheus_check import WINDOW, installed, running

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
_COLORS = ("#1f6feb", "#b35900", "#1a7f37", "#8250df", "#c62828", "#0b7285", "#7a5b00", "#57606a")
_WIDTH, _HEIGHT, _GAP, _LEFT = 440, 196, 12, 72
_PLOT_TOP, _PLOT_HEIGHT = 34, 104
_MAX_LEGENDS = 8
_CLIENTS = 4
_GAP_S = 5.5  # a line is broken where this long no value came
_UNITS = {"Bps": "B/s", "reqps": "req/s"}
# Seconds since 1970 and value.
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel."""

    legend: str
    points: Points


def parse_lines(results: Sequence[Mapping[str, Any]], legend: str) -> list[Line]:
    """Lines of a range query's answer. `legend`: Grafana's, with labels in double braces."""
    lines = []
    for one in results:
        points = [(float(at), float(value)) for at, value in one["values"]]
        lines.append(Line(_legend(legend, one["metric"]), [point for point in points if math.isfinite(point[1])]))
    return [line for line in lines if line.points]


def _legend(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda label: labels.get(label[1], ""), legend).strip()


def format_value(value: float, unit: str) -> str:
    """A value with one of the units that the dashboards use."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    scales = ((1e9, "G"), (1e6, "M"), (1e3, "k")) if unit in ("Bps", "none") else ()
    scale, prefix = next(((size, name) for size, name in scales if value >= size), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{_UNITS.get(unit, '')}".strip()


def draw_dashboard(title: str, panels: Sequence[tuple[Panel, Sequence[Line]]], span: tuple[float, float]) -> str:
    """All panels of a dashboard as one SVG, two in a row. `span`: the first and last second."""
    rows = (len(panels) + 1) // 2
    width, height = 2 * _WIDTH + 3 * _GAP, rows * (_HEIGHT + _GAP) + _GAP + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f7"/>',
        f'<text x="{_GAP}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for number, ((name, unit, _), lines) in enumerate(panels):
        x, y = _GAP + (number % 2) * (_WIDTH + _GAP), 34 + (number // 2) * (_HEIGHT + _GAP)
        parts += [f'<g transform="translate({x} {y})">', *_draw_panel(name, unit, lines, span), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(title: str, unit: str, lines: Sequence[Line], span: tuple[float, float]) -> list[str]:
    begin, end = span
    most = max((value for line in lines for _, value in line.points), default=0.0) or 1.0
    top, bottom = _PLOT_TOP, _PLOT_TOP + _PLOT_HEIGHT
    scale = (_WIDTH - _LEFT - 12) / (end - begin)
    parts = [
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="#ffffff" stroke="#d9dee5"/>',
        f'<text x="10" y="20" font-weight="bold" font-size="12">{escape(title)}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * _PLOT_HEIGHT
        parts += [
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 12}" stroke="#e3e6ea"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">'
            f"{escape(format_value(share * most, unit))}</text>",
        ]
    if not lines:
        parts.append(f'<text x="{_WIDTH / 2}" y="{(top + bottom) / 2}" text-anchor="middle">No traffic</text>')
    for number, line in enumerate(lines):
        color = _COLORS[number % len(_COLORS)]
        places = [
            (_LEFT + scale * (at - begin), bottom - _PLOT_HEIGHT * max(value, 0.0) / most) for at, value in line.points
        ]
        gaps = [True, *(b[0] - a[0] > _GAP_S * scale for a, b in itertools.pairwise(places))]
        path = "".join(f"{'M' if gap else 'L'}{x:.1f} {y:.1f}" for gap, (x, y) in zip(gaps, places, strict=True))
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if number < _MAX_LEGENDS:
            x, y = 12 + (number % 2) * (_WIDTH // 2 - 8), bottom + 16 + 12 * (number // 2)
            told = f"{line.legend}: {format_value(max(value for _, value in line.points), unit)}"
            parts += [
                f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{color}"/>',
                f'<text x="{x + 13}" y="{y}">{escape(told)}</text>',
            ]
    return parts


def _ask_range(server: str, query: str, span: tuple[float, float]) -> list[Mapping[str, Any]]:
    asked = {"query": query.replace("$__rate_interval", WINDOW), "start": span[0], "end": span[1], "step": "1s"}
    with urllib.request.urlopen(f"{server}/api/v1/query_range?{urllib.parse.urlencode(asked)}", timeout=20) as answer:
        found: list[Mapping[str, Any]] = json.load(answer)["data"]["result"]
    return found


async def _client(url: str, seed: int, ended: asyncio.Event) -> None:
    """Prompts of many lengths, one after the other. They begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(16, 250) for _ in range(200)]
    async with aiohttp.ClientSession() as session:
        while not ended.is_set():
            length = rng.choice((24, 48, 200, 400, 800))
            prompt = [*common[: length // 2], *(rng.randrange(16, 250) for _ in range(length // 2))]
            body = {"prompt": prompt, "max_tokens": rng.choice((24, 64)), "temperature": 0.0}
            try:
                await stream_completion(session, url, body)
            except (BatonError, RuntimeError, aiohttp.ClientError):
                await asyncio.sleep(0.1)


async def _load(up: Deployment, seconds: float) -> None:
    """Load for so long, and while a decode engine, which is lost after a third of the time, starts again."""
    ended = asyncio.Event()
    clients = [asyncio.create_task(_client(up.url, seed, ended)) for seed in range(_CLIENTS)]
    await asyncio.sleep(seconds / 3)
    up.kill("decode-1")
    await asyncio.sleep(seconds / 6)
    await asyncio.to_thread(up.restart, "decode-1")
    await asyncio.sleep(seconds / 2)
    ended.set()
    await asyncio.gather(*clients)


def main(
    seconds: Annotated[float, typer.Option(help="How long the load lasts.")] = 90.0,
    output: Annotated[Path, typer.Option(help="Where the pictures go.")] = PICTURES,
) -> None:
    """Run a deployment under load, and draw what Prometheus answers. Exit status 1 if a panel has no data."""
    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--served-model-name", "baton-demo-llama"]
    empty = []
    with (
        Deployment(str(TARGET), 1, 2, engine_flags=flags, router_flags=["--max-local-prefill-length", "64"]) as up,
        running(installed(), up.url) as server,
    ):
        begin = time.time()
        asyncio.run(_load(up, seconds))
        span = (begin, time.time())
        for name, (title, panels) in DASHBOARDS.items():
            drawn = []
            for panel in panels:
                lines = [
                    line for legend, query in panel[2] for line in parse_lines(_ask_range(server, query, span), legend)
                ]
                empty += [] if lines else [f"{name}: {panel[0]}"]
                drawn.append((panel, lines))
            (output / f"panels-{name}.svg").write_text(draw_dashboard(title, drawn, span))
    print(f"{sum(len(panels) for _, panels in DASHBOARDS.values())} panels, without data: {empty or 'none'}")
    raise typer.Exit(int(bool(empty)))


if __name__ == "__main__":
    typer.run(main)

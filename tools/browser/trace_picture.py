"""Draw docs/pictures/trace.svg: the trace of one request whose decode engine is killed, from a real deployment.

Its spans come from a collector that parses them with opentelemetry-proto.

python -m tools.browser.trace_picture
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from html import escape
from pathlib import Path
from typing import Any

import aiohttp

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from testkit.servers.collector import Collector, attributes

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "trace.svg"
_MODEL, _HEAD = "models/baton-demo-llama", "models/baton-demo-eagle3"
_COLORS = {"router": "#1f6feb", "prefill-0": "#1a7f37", "decode-0": "#b35900", "decode-1": "#8250df"}
_WIDTH, _LEFT, _ROW = 900, 250, 22


async def _request(up: Deployment) -> None:
    """Warm both decode engines up, then kill the one that decodes a long request."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": [20 + i % 200 for i in range(600)], "max_tokens": 16, "temperature": 0.0}
        for _ in range(4):
            await stream_completion(session, up.url, body)
        other = [20 + (7 * i) % 200 for i in range(600)]  # no prefix hit
        asked = {**body, "prompt": other, "max_tokens": 1500, "ignore_eos": True}
        long = asyncio.create_task(stream_completion(session, up.url, asked))
        while True:
            async with session.get(f"{up.url}/status") as response:
                engines = (await response.json())["engines"]
            busy = [e for e in engines if e["role"] == "decode" and e["load"] and e["load"]["num_running"]]
            if busy:
                break
        up.kill(busy[0]["info"]["engine_id"])
        with contextlib.suppress(RuntimeError):
            await long


def draw(every: list[Any]) -> str:
    """The spans of the last request that was recovered, as an SVG. Events of a handoff are lines in its bar."""
    trace = next(span.trace_id for span in reversed(every) if span.name == "baton.recovery")
    spans = sorted((span for span in every if span.trace_id == trace), key=lambda s: s.start_time_unix_nano)
    by_id = {span.span_id: span for span in spans}
    start = spans[0].start_time_unix_nano
    length = max(span.end_time_unix_nano for span in spans) - start
    height, scale = _ROW * len(spans) + 40, (_WIDTH - _LEFT - 90) / length
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for row, span in enumerate(spans):
        process, took = _process(span, by_id), span.end_time_unix_nano - span.start_time_unix_nano
        x, width, y = _LEFT + scale * (span.start_time_unix_nano - start), max(1.5, scale * took), _ROW * row + 8
        failed = ' stroke="#c62828" stroke-width="2"' if span.status.code == 2 else ""
        parts += [
            f'<text x="6" y="{y + 12}">{escape(process)}: {escape(span.name)}</text>',
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="15" rx="2" fill="{_COLORS[process]}"{failed}/>',
            f'<text x="{x + width + 4:.1f}" y="{y + 12}">{took / 1e6:.1f} ms</text>',
        ]
        for event in span.events:
            at = _LEFT + scale * (event.time_unix_nano - start)
            title = f"<title>{escape(event.name)}</title>"
            parts.append(f'<path d="M{at:.1f} {y}v15" stroke="#ffffff" stroke-width="0.6">{title}</path>')
    parts.append(f'<text x="6" y="{height - 8}" fill="#57606a">Red frames: the spans that failed.</text></svg>')
    return "\n".join(parts) + "\n"


def _process(span: Any, by_id: dict[bytes, Any]) -> str:
    """Where the span ran: the router, or the engine of the leg above it."""
    above = by_id.get(span.parent_span_id)
    while above is not None:
        if (engine := attributes(above).get("baton.engine")) is not None:
            return str(engine)
        above = by_id.get(above.parent_span_id)
    return "router"


async def _record() -> list[Any]:
    flags = ["--speculative-config", json.dumps({"method": "eagle3", "model": _HEAD, "num_speculative_tokens": 3})]
    flags += ["--max-num-batched-tokens", "256"]  # several chunks
    collector = Collector()
    async with collector.run() as endpoint:
        to = ["--otlp-traces-endpoint", endpoint]
        up = await asyncio.to_thread(Deployment, _MODEL, 1, 2, engine_flags=flags, router_flags=to)
        try:
            await _request(up)
        finally:
            await asyncio.to_thread(up.close)  # the router sends what it has left
    return collector.spans


def main() -> None:
    PICTURE.write_text(draw(asyncio.run(_record())))


if __name__ == "__main__":
    main()

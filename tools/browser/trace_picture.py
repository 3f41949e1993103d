"""Draw docs/pictures/trace.svg: the trace of one request whose decode engine is killed, from a real deployment.

python -m tools.browser.trace_picture
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import aiohttp

from baton.bench.client import stream_completion
from baton.deployment import Deployment

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
        long = asyncio.create_task(stream_completion(session, up.url, {**body, "max_tokens": 300}))
        while True:
            async with session.get(f"{up.url}/status") as response:
                engines = (await response.json())["engines"]
            busy = [e for e in engines if e["role"] == "decode" and e["load"] and e["load"]["num_running"]]
            if busy:
                break
        up.kill(busy[0]["info"]["engine_id"])
        with contextlib.suppress(RuntimeError):
            await long


def draw(events: list[dict[str, Any]]) -> str:
    """The spans of the last request that was recovered, as an SVG."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    thread = next(event["tid"] for event in reversed(events) if event["name"] == "baton.recovery")
    spans = sorted((e for e in events if e["ph"] == "X" and e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"]))
    start = min(span["ts"] for span in spans)
    length = max(span["ts"] + span["dur"] for span in spans) - start
    height = _ROW * len(spans) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for row, span in enumerate(spans):
        process = names[span["pid"]]
        x = _LEFT + (_WIDTH - _LEFT - 90) * (span["ts"] - start) / length
        width = max(1.5, (_WIDTH - _LEFT - 90) * span["dur"] / length)
        y = _ROW * row + 8
        failed = ' stroke="#c62828" stroke-width="2"' if "error" in span["args"] else ""
        color = _COLORS.get(process, "#57606a")
        parts += [
            f'<text x="6" y="{y + 12}">{escape(process)}: {escape(span["name"])}</text>',
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="15" rx="2" fill="{color}"{failed}/>',
            f'<text x="{x + width + 4:.1f}" y="{y + 12}">{span["dur"] / 1e3:.1f} ms</text>',
        ]
    parts.append(f'<text x="6" y="{height - 8}" fill="#57606a">Red frames: the spans that failed.</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    speculation = json.dumps({"method": "eagle3", "model": _HEAD, "num_speculative_tokens": 3})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        flags = ["--speculative-config", speculation]
        with Deployment(_MODEL, 1, 2, engine_flags=flags, router_flags=["--trace", str(file)]) as up:
            asyncio.run(_request(up))
        text = file.read_text().rstrip()
        PICTURE.write_text(draw(json.loads(text if text.endswith("]") else f"{text}]")))


if __name__ == "__main__":
    main()

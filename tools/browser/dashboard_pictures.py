"""Take the pictures of the dashboard in docs/pictures: one prefill and two decode engines under load, in Chromium.

    python -m tools.browser.dashboard_pictures [--output DIR]

Needs `chromium` (`apt-get install chromium`). One decode engine is killed, so that a recovery and an alarm are seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from tools.browser.chromium import Tab, browser

_MODEL, _HEAD = "models/baton-demo-llama", "models/baton-demo-eagle3"
_ROUTER = ["--max-local-prefill-length", "64"]
_LOAD_S = 45.0
_NUM_CLIENTS = 4


async def client(url: str, seed: int, ended: asyncio.Event) -> None:
    """Send prompts of many lengths, one after the other."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        while not ended.is_set():
            prompt = [rng.randrange(16, 250) for _ in range(rng.choice((24, 48, 200, 400, 800)))]
            body = {"prompt": prompt, "max_tokens": rng.choice((24, 64)), "temperature": 0.0}
            with contextlib.suppress(RuntimeError, aiohttp.ClientError):
                await stream_completion(session, url, body)


async def visit(tab: Tab, url: str, output: Path) -> None:
    """Look at the page, wide and light, wide and dark, and as on a phone."""
    await tab.size(1360, 900)
    await tab.open(f"{url}/dashboard")
    await tab.until("document.querySelectorAll('#requests tbody tr button').length > 5")
    await tab.until("[...document.querySelectorAll('#requests tbody tr')].some(r => r.innerText.includes('length'))")
    await tab.value(
        "[...document.querySelectorAll('#requests tbody tr')].find(r => r.innerText.includes('handed off') && "
        "r.innerText.includes('length')).querySelector('button').click()"
    )
    await tab.until("document.querySelector('#timeline svg')")
    for name, width, height, dark in (
        ("dashboard", 1360, 1640, False),
        ("dashboard-dark", 1360, 1640, True),
        ("dashboard-phone", 390, 1400, False),
    ):
        await tab.size(width, height)
        await tab.dark(dark)
        await asyncio.sleep(1.0)
        await tab.screenshot(output / f"{name}.webp", width, height)


async def take(up: Deployment, output: Path) -> None:
    ended = asyncio.Event()
    clients = [asyncio.create_task(client(up.url, seed, ended)) for seed in range(_NUM_CLIENTS)]
    await asyncio.sleep(_LOAD_S)
    async with browser() as tab:
        await visit(tab, up.url, output)
        up.kill("decode-1")
        await tab.size(1360, 900)
        await tab.dark(False)
        await tab.until("document.querySelectorAll('#alarms .alarm').length")
        await tab.until("document.getElementById('recoveries').innerText.includes('recovery')")
        await tab.screenshot(output / "dashboard-lost-engine.webp", 1360, 900)
    ended.set()
    await asyncio.gather(*clients)


def main(output: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("docs/pictures")) -> None:
    """Run a deployment under load and take pictures of its dashboard."""
    speculation = json.dumps({"method": "eagle3", "model": _HEAD, "num_speculative_tokens": 3})
    flags = ["--speculative-config", speculation, "--served-model-name", "baton-demo-llama"]
    with Deployment(_MODEL, prefill=1, decode=2, engine_flags=flags, router_flags=_ROUTER) as up:
        asyncio.run(take(up, output))


if __name__ == "__main__":
    typer.run(main)

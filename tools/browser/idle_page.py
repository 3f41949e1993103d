"""CPU time of a deployment without requests: without a page, and while Chromium has its dashboard open.

    python -m tools.browser.idle_page [--seconds 60] [--pages 1]

One prefill and one decode engine with EAGLE-3 and their router, which have served a request before. Chromium is not
counted. Other load on the machine makes the figures larger.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Annotated

import aiohttp
import typer

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from benchmarks.demo import SPECULATIVE, TARGET
from benchmarks.faults.wrong_drafter import speculation
from benchmarks.scrape import descendants, process_cpu_s
from tools.browser.chromium import browser


async def share(processes: dict[str, int], seconds: float) -> dict[str, float]:
    """By process, its CPU time per second."""
    before = {name: process_cpu_s(pid) for name, pid in processes.items()}
    await asyncio.sleep(seconds)
    return {name: (process_cpu_s(pid) - before[name]) / seconds for name, pid in processes.items()}


def _name(words: list[str]) -> str:
    """Of a child of the deployment: `router`, or the engine's id."""
    return (
        words[words.index("--engine-id") + 1] if "--engine-id" in words else "router" if "router" in words else "other"
    )


async def measure(url: str, seconds: float, pages: int) -> None:
    processes = {f"{_name(words)} ({pid})": pid for pid, words in descendants(os.getpid()).items()}
    async with aiohttp.ClientSession() as session:
        for length in (32, 600):
            await stream_completion(session, url, {"prompt": [20] * length, "max_tokens": 8, "temperature": 0.0})
    await asyncio.sleep(5.0)
    _report("no page", await share(processes, seconds))
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(pages):
            tab = await stack.enter_async_context(browser())
            await tab.open(f"{url}/dashboard")
            await tab.until("document.querySelectorAll('#requests tbody tr').length == 2")
        await asyncio.sleep(5.0)
        _report(f"{pages} open pages", await share(processes, seconds))


def _report(what: str, shares: dict[str, float]) -> None:
    each = ", ".join(f"{name} {100 * one:.2f} %" for name, one in shares.items())
    print(f"{what}: {100 * sum(shares.values()):.2f} % of a core ({each})", flush=True)


def main(
    seconds: Annotated[float, typer.Option(help="How long each is measured.")] = 60.0,
    pages: Annotated[int, typer.Option(help="How many browsers have the page open.")] = 1,
) -> None:
    """Print the CPU time of an idle deployment."""
    with Deployment(str(TARGET), engine_flags=["--speculative-config", speculation(str(SPECULATIVE["model"]))]) as up:
        asyncio.run(measure(up.url, seconds, pages))


if __name__ == "__main__":
    typer.run(main)

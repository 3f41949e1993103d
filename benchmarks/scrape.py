"""Reads state from servers (metrics, load) and from the kernel (process memory)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from baton.errors import BatonError
from baton.openai.client import OpenAIClient
from baton.transports.process import stat_of

IDLE_LIMIT_S = 60.0
_HELD = ("num_running", "num_waiting", "num_handoffs", "num_referenced_pages", "num_quarantined_pages")


async def scrape(session: aiohttp.ClientSession, url: str, name: str, **labels: str) -> list[float]:
    """A metric's samples with these labels, one per set of labels. `name` of a counter without `_total`."""
    return [
        sample.value
        for sample in await OpenAIClient(session, url).samples()
        if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
    ]


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


async def held(session: aiohttp.ClientSession, engine: str) -> dict[str, int]:
    """Requests, handoffs and pages of an engine, by name; empty if it is idle."""
    load = await get_json(session, f"{engine}/inference/v1/load")
    return {name: load[name] for name in _HELD if load[name]}


async def until_idle(session: aiohttp.ClientSession, engines: Sequence[str]) -> None:
    """Wait until all engines are idle. Raises `BatonError` after a minute, with what is held."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    for url in engines:
        while found := await held(session, url):
            if time.monotonic() > deadline:
                raise BatonError(f"{url} does not come to rest: {found}")
            await asyncio.sleep(0.02)


def process_status(pid: int) -> dict[str, str]:
    """The fields of a process's `/proc/PID/status`."""
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def own_mib(status: dict[str, str]) -> float:
    """Anonymous memory of a process, in MiB."""
    return int(status["RssAnon"].split()[0]) / 1024


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, of all its threads, with the resolution of the kernel's scheduler. Raises
    `OSError` if there is no such process."""
    return time.clock_gettime((~pid << 3) | 2)  # its CPU clock, as clock_getcpuclockid(3) makes it


def descendants(pid: int) -> dict[int, list[str]]:
    """The command lines of all processes below `pid`."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := stat_of(int(entry.name)):
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, list[str]] = {}
    for one in parents:
        above = parents[one]
        while above in parents and above != pid:
            above = parents[above]
        if above == pid:
            words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
            found[one] = [word.decode(errors="replace") for word in words]
    return found

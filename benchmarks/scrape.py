"""What servers tell of themselves: a figure of their metrics, and what an engine holds."""

from __future__ import annotations

from typing import Any

import aiohttp

from baton.openai.client import OpenAIClient

_HELD = ("num_running", "num_waiting", "num_handoffs", "num_referenced_pages", "num_quarantined_pages")


async def scrape(session: aiohttp.ClientSession, url: str, name: str, **labels: str) -> list[float]:
    """A metric's samples that have these labels, one for each set of labels; `name` of a counter without `_total`."""
    return [
        sample.value
        for sample in await OpenAIClient(session, url).samples()
        if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
    ]


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    """The JSON at `url`."""
    async with session.get(url) as response:
        return await response.json()


async def held(session: aiohttp.ClientSession, engine: str) -> dict[str, int]:
    """Requests, handoffs and pages of an engine, by name; empty when it is idle."""
    load = await get_json(session, f"{engine}/inference/v1/load")
    return {name: load[name] for name in _HELD if load[name]}

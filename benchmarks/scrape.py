"""A figure of a server's `/metrics`."""

from __future__ import annotations

import aiohttp

from baton.openai.client import OpenAIClient


async def scrape(session: aiohttp.ClientSession, url: str, name: str, **labels: str) -> list[float]:
    """A metric's samples that have these labels, one for each set of labels; `name` of a counter without `_total`."""
    return [
        sample.value
        for sample in await OpenAIClient(session, url).samples()
        if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
    ]

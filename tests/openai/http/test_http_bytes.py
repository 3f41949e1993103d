"""A stranger's bytes at an HTTP port."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from baton.server import build_app
from baton.text import Tokenizer
from simulation.fuzz.http_bytes import HttpMaker
from testkit.servers.fake_serving import FakeEngine, served


async def test_a_server_answers_after_any_bytes(directory: Path, session: aiohttp.ClientSession) -> None:
    """A slice of `python -m simulation.fuzz.deployment`, which attacks whole processes."""
    maker = HttpMaker(random.Random(3))
    engine = FakeEngine(directory)
    async with served(build_app(engine, Tokenizer.load(directory))) as url:
        place = urlsplit(url)
        for _ in range(300):
            _, writer = await asyncio.open_connection(place.hostname, place.port)
            for step in maker.steps():
                writer.write(step.data)
            await asyncio.sleep(0)
            writer.transport.abort()
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200
    assert not engine.requests

"""A stranger's bytes at an HTTP port."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

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


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nX: " + b"a" * 2**20, b"GET /" + b"a" * 2**20, b"\0" * 2**20])
@pytest.mark.parametrize("pause", [False, True])
async def test_a_client_reads_why_its_long_head_is_refused(directory: Path, head: bytes, pause: bool) -> None:
    """Though it is still sending when it is refused."""
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        half = len(head) // 2
        writer.write(head[:half])
        if pause:
            await writer.drain()
        writer.write(head[half:])
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert b" 400 Bad Request" in answer
        assert b"malformed_http" in answer

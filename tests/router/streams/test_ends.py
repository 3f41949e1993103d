"""The end of a stream, and what follows it on the client's connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from baton.event_loop import timeout
from testkit.servers.fleets import Setup

BODY = {"prompt": "a", "max_tokens": 30, "seed": 3, "stream": True}
LIMIT_S = 60.0


def request_bytes(version: str = "1.1", more: str = "", **body: Any) -> bytes:
    data = json.dumps({**BODY, **body}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}{more}Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextlib.asynccontextmanager
async def connected(directory: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with Setup(directory, step_s=0.002).run() as (url, _), timeout(LIMIT_S):
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        yield reader, writer
        writer.close()


async def chunks_of(reader: asyncio.StreamReader) -> bytes:
    """A response's body, which must be in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


def tokens_of(body: bytes) -> list[int]:
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events[:-2]]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    return [len(choice["text"]) for choice in choices]


@pytest.mark.parametrize("at_once", [True, False], ids=["pipelined", "one after the other"])
async def test_streams_of_one_connection_follow_each_other(directory: Path, at_once: bool) -> None:
    numbers = [30, 1, 2, 30]
    async with connected(directory) as (reader, writer):
        many = [request_bytes(max_tokens=number) for number in numbers]
        if at_once:
            writer.write(b"".join(many))
        for number, one in zip(numbers, many, strict=True):
            if not at_once:
                writer.write(one)
            assert sum(tokens_of(await chunks_of(reader))) >= max(1, number - 5)


async def test_clients_of_http_1_0_get_the_whole_stream(directory: Path) -> None:
    async with connected(directory) as (reader, writer):
        writer.write(request_bytes("1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert len(tokens_of(body)) > 1


async def test_a_request_in_two_packets_waits_for_the_stream_before_it(directory: Path) -> None:
    async with connected(directory) as (reader, writer):
        data = request_bytes()
        writer.write(data + data[:9])
        assert len(tokens_of(await chunks_of(reader))) > 1
        writer.write(data[9:])
        assert len(tokens_of(await chunks_of(reader))) > 1

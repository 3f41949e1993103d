"""Clients that cost a server more than they should: they read nothing, disconnect during a stream, send slowly, or send
small bodies that decompress to large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

SLOW_BYTES_PER_S = 2
_DEFLATED_MIB = 3072  # about 3 MiB compressed


@asynccontextmanager
async def hostile_clients(
    url: str, body: dict[str, Any], num_silent: int, num_leaving: int, num_slow: int, leave_every_s: float
) -> AsyncIterator[None]:
    """While the context lasts, run `num_silent` clients that never read their streams, `num_leaving` that disconnect
    after their first tokens, one each `leave_every_s` seconds, and `num_slow` that send their bodies byte by byte. All
    stream `body`.
    """
    request = _request(url, {**body, "stream": True})
    clients = [_forever(lambda: _reads_nothing(url, request)) for _ in range(num_silent)]
    clients += [_forever(lambda: _sends_slowly(url, request)) for _ in range(num_slow)]
    clients += [_leaves(url, request, number * leave_every_s) for number in range(num_leaving)]
    async with _running(clients):
        yield


@asynccontextmanager
async def unread_and_deflated(
    url: str, body: dict[str, Any], num_unread: int, num_deflated: int
) -> AsyncIterator[None]:
    """While the context lasts, run `num_unread` clients that send `body` once and never read the stream, and
    `num_deflated` that send a compressed body again and again. They have begun when the context is entered.
    """
    request = _request(url, {**body, "stream": True})
    bomb = _deflated()
    clients = [_reads_nothing(url, request) for _ in range(num_unread)]
    clients += [_forever(lambda: _sends_deflated(url, bomb)) for _ in range(num_deflated)]
    async with _running(clients):
        await asyncio.sleep(1.0)
        yield


@asynccontextmanager
async def _running(clients: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(client) for client in clients]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _request(url: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection with small buffers, so that a writer to it soon blocks."""
    parts = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _forever(client: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        with contextlib.suppress(OSError):
            await client()
        await asyncio.sleep(0.5)


async def _reads_nothing(url: str, request: bytes) -> None:
    async with _connected(url) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # the one way to read nothing at all
        writer.write(request)
        await asyncio.sleep(3600.0)


def _deflated() -> bytes:
    """A deflated body of spaces, which is valid JSON so far."""
    packer = zlib.compressobj(9)
    start = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    # After a full flush no block refers to earlier data, so this block may be repeated any number of times.
    return start + (packer.compress(b" " * 2**20) + packer.flush(zlib.Z_FULL_FLUSH)) * _DEFLATED_MIB


async def _sends_deflated(url: str, body: bytes) -> None:
    async with _connected(url) as (reader, writer):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.read(100)


async def _sends_slowly(url: str, request: bytes) -> None:
    async with _connected(url) as (reader, writer):
        for byte in request:
            if reader.at_eof() or writer.is_closing():
                return
            writer.write(bytes([byte]))
            await asyncio.sleep(1.0 / SLOW_BYTES_PER_S)


async def _leaves(url: str, request: bytes, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        async with _connected(url) as (reader, writer):
            writer.write(request)
            for _ in range(3):
                await reader.readuntil(b"\n\n")

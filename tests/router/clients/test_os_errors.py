"""Connections of the router to an engine that the operating system refuses, breaks or delivers in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from baton.errors import BatonError, EngineLostError, EngineUnavailableError, ShortageError
from baton.router.clients.engine_client import BatonClient, new_session
from baton.router.pool import EnginePool
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import EngineInfo, GenerateRequest, TokenChunk
from testkit.servers.fake_serving import FakeEngine

TIMERS = RouterTimers(check=0.05, answer=0.5)
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
CHUNKS = [TokenChunk(request_id="r", token_ids=[7]), TokenChunk(request_id="r", finish_reason="stop", position=1)]
LINES = b"".join(msgspec.json.encode(chunk) + b"\n" for chunk in CHUNKS)
Write = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset: the peer's next call fails with ECONNRESET."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def head(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)


async def at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    reset(writer)


async def when_asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    await reader.readuntil(b"\r\n\r\n")
    reset(writer)


async def closed_when_asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def in_the_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(head(body)[:30])
    await writer.drain()


async def before_the_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(head(body))
    await writer.drain()


async def in_the_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(head(body) + body[:-3])
    await writer.drain()


async def in_a_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    """Of a response that ends with its connection, so that HTTP does not tell that it is cut."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body[:-1])
    await writer.drain()


async def after_the_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    """Byte for byte, so that every read of the router is partial."""
    await reader.readuntil(b"\r\n\r\n")
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in head(body) + body:
        writer.write(bytes([byte]))
        await asyncio.sleep(0)


BREAKS = [at_once, when_asked, closed_when_asked, in_the_head, before_the_body, in_the_body]


@contextlib.asynccontextmanager
async def server(write: Write, body: bytes) -> AsyncIterator[BatonClient]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await write(reader, writer, body)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, new_session() as session:
        yield BatonClient(session, f"http://127.0.0.1:{port}", TIMERS)


async def info_of(client: BatonClient) -> EngineInfo:
    return await client.info()


async def leg_of(client: BatonClient) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(REQUEST)]


@pytest.mark.parametrize("write", [*BREAKS, in_a_line])
async def test_a_leg_whose_connection_breaks_is_lost(write: Write) -> None:
    """The engine may have taken the request, so it must not be sent a second time without recovery."""
    async with server(write, LINES) as client:
        with pytest.raises(EngineLostError, match=r"^engine http://127.0.0.1:\d+[: ]"):
            await leg_of(client)


@pytest.mark.parametrize("write", BREAKS)
async def test_an_engine_that_breaks_an_answer_is_there_no_more(write: Write, directory: Path) -> None:
    async with server(write, msgspec.json.encode(FakeEngine(directory).info)) as client:
        with pytest.raises(EngineUnavailableError) as raised:
            await info_of(client)
    assert type(raised.value) is EngineUnavailableError


async def test_an_answer_in_single_bytes_is_whole(directory: Path) -> None:
    info = FakeEngine(directory).info
    async with server(after_the_body, msgspec.json.encode(info)) as client:
        assert await info_of(client) == info
    async with server(after_the_body, LINES) as client:
        assert await leg_of(client) == CHUNKS


@contextlib.asynccontextmanager
async def unconnectable(code: int) -> AsyncIterator[BatonClient]:
    """A client whose every new socket fails with `code`."""

    def no_socket(address: object) -> socket.socket:
        raise OSError(code, os.strerror(code))

    connector = aiohttp.TCPConnector(socket_factory=no_socket)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield BatonClient(session, "http://127.0.0.1:1", TIMERS)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EMFILE, ShortageError),
        (errno.ENFILE, ShortageError),
        (errno.ENOBUFS, ShortageError),
        (errno.ENOMEM, ShortageError),
        (errno.EADDRNOTAVAIL, ShortageError),
        (errno.ECONNREFUSED, EngineUnavailableError),
        (errno.EHOSTUNREACH, EngineUnavailableError),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else "",
)
async def test_a_client_that_cannot_connect_sends_no_leg(code: int, kind: type[BatonError]) -> None:
    """A shortage of this process is told apart from an engine that is gone."""
    async with unconnectable(code) as client:
        for call in (info_of, leg_of):
            with pytest.raises(EngineUnavailableError, match=os.strerror(code)) as raised:
                await call(client)
            assert type(raised.value) is (kind if call is info_of else EngineUnavailableError)


async def test_a_router_without_descriptors_gives_up_no_engine(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It neither takes a healthy engine for gone, nor forgets how long a silent one has been silent."""
    info = FakeEngine(directory).info

    class Client:
        has_ranks, url, failure = False, "http://a:1", BatonError("")

        def __init__(self, *_: object) -> None:
            self.asked = 0

        async def info(self) -> EngineInfo:
            self.asked += 1
            if str(self.failure):
                raise self.failure
            return info

    async with new_session() as session:
        pool = EnginePool(session, Client, timers=TIMERS)  # type: ignore[arg-type]
        engine = await pool.add("http://a:1", info.role)
        client = engine.client
        assert isinstance(client, Client)

        async def ask(failure: str, kind: type[BatonError] = ShortageError) -> tuple[bool, bool, int]:
            client.failure = kind(failure)
            await pool.refresh(engine)
            return engine.healthy, engine.gone, engine.num_silent

        assert await ask("short") == (True, False, 0)
        assert await ask("short") == (True, False, 0)
        assert caplog.text.count("cannot be asked: short") == 1
        assert await ask("silent", EngineLostError) == (False, False, 1)
        assert await ask("short") == (False, False, 1)
        assert await ask("silent", EngineLostError) == (False, False, 2)
        assert await ask("") == (True, False, 0)
        assert await ask("refused", EngineUnavailableError) == (False, True, 0)
        assert await ask("") == (True, False, 0)
        assert await ask("short") == (True, False, 0)
        assert caplog.text.count("cannot be asked: short") == 2

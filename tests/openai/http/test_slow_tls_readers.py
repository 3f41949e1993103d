"""Over TLS too, a client that reads slowly or not at all costs its own connection."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.event_loop import timeout
from baton.openai import FrontMetrics
from baton.openai.http.access import Access
from baton.openai.http.app import json_response, new_app
from baton.openai.http.limits import HttpLimits
from testkit.clients.reader import LONG, Reader
from testkit.servers.fake_serving import until
from tests.openai.http.test_doors import CERT, trusting
from tests.openai.http.test_doors import KEY as KEY_FILE
from tests.openai.http.test_slow_readers import (
    LIMIT_S,
    app_of_endless_streams,
    app_of_large_answers,
    fronts,
    narrow,
)

TLS = Access(ssl_certfile=CERT, ssl_keyfile=KEY_FILE)


class TlsReader(Reader):
    """A client that asks, and reads when it is told to."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self.socket: ssl.SSLSocket = connected

    async def read(self, most: int = 2**16) -> bytes:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.socket, ready.set)
        try:
            while True:
                try:
                    return self.socket.recv(most)
                except ssl.SSLWantReadError:
                    ready.clear()
                    await ready.wait()
        finally:
            loop.remove_reader(self.socket)


def connected(url: str) -> ssl.SSLSocket:
    """A connection after its handshake, of whose answers the kernel keeps little."""
    host, port = url.removeprefix("https://").split(":")
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect((host, int(port)))
    return trusting().wrap_socket(plain, server_hostname="localhost")


@pytest.fixture
async def readers() -> AsyncIterator[Callable[..., Awaitable[TlsReader]]]:
    """Makes them, and closes them."""
    made: list[TlsReader] = []

    async def make(url: str, path: str = "/v1/completions", body: Any = LONG) -> TlsReader:
        # The server's part of a handshake is done by this thread's loop.
        made.append(TlsReader(await asyncio.to_thread(connected, url)))
        made[-1].socket.setblocking(False)
        made[-1].ask(path, json.dumps(body).encode())
        return made[-1]

    yield make
    for reader in made:
        reader.socket.close()


async def test_streams_that_nobody_reads_hold_no_place(
    directory: Path, readers: Callable[..., Awaitable[TlsReader]]
) -> None:
    async with fronts(directory, "engine", TLS, write_s=3600.0) as (url, engines):
        engines[-1].accept = 3  # few turns of the event loop: each may take long
        many = [await readers(url) for _ in range(8)]
        async with timeout(LIMIT_S):
            await until(lambda: engines[-1].outcomes["length"] == 8)
            texts = await asyncio.gather(*(reader.text() for reader in many))
        assert len({text.count(b"data: ") for text in texts}) == 1
        assert all(b"data: [DONE]" in text for text in texts)


@pytest.mark.parametrize("front", ["engine", "router"])
async def test_a_stream_that_nobody_reads_is_aborted_in_time(
    directory: Path, readers: Callable[..., Awaitable[TlsReader]], front: str
) -> None:
    async with fronts(directory, front, TLS, write_s=0.3) as (url, engines):
        engines[0].step_s = 0.01
        many = [await readers(url) for _ in range(2)]
        await until(lambda: engines[0].outcomes["aborted"] == 2)
        async with timeout(LIMIT_S):
            await asyncio.gather(*(reader.until_cut() for reader in many))


async def test_unread_bytes_of_one_reader_are_bounded(
    directory: Path, readers: Callable[..., Awaitable[TlsReader]]
) -> None:
    async with fronts(directory, "engine", TLS, write_s=3600.0, stream_bytes=100_000) as (url, engines):
        reader = await readers(url)
        await until(lambda: engines[0].outcomes["aborted"] == 1)
        async with timeout(LIMIT_S):
            await reader.until_cut()


async def test_a_slow_reader_is_cut_off_and_a_fast_one_is_not(
    readers: Callable[..., Awaitable[TlsReader]],
) -> None:
    ended: list[str] = []
    async with narrow(app_of_endless_streams(ended, TLS)) as url:
        trickles = asyncio.create_task((await readers(url, "/trickles")).until_cut(10, 0.01))
        keeps_up = asyncio.create_task((await readers(url, "/keeps-up")).until_cut())
        await until(lambda: ended)
        assert ended == ["/trickles"]
        for task in (trickles, keeps_up):
            task.cancel()
        await asyncio.gather(trickles, keeps_up, return_exceptions=True)


@pytest.mark.parametrize("size", [2**20, 60_000])
@pytest.mark.parametrize("close", [True, False])
async def test_whole_answers_that_nobody_reads_are_cut_off_too(
    size: int, close: bool, readers: Callable[..., Awaitable[TlsReader]]
) -> None:
    sockets: list[Any] = []
    async with narrow(app_of_large_answers(sockets, size, close, TLS)) as url:
        await readers(url, "/large")
        await until(lambda: sockets and sockets[0].fileno() == -1)


async def test_one_answer_waits_however_many_were_asked_for(
    readers: Callable[..., Awaitable[TlsReader]],
) -> None:
    asked = 0

    async def large(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return json_response("x" * 2**20)

    app = new_app(FrontMetrics(), HttpLimits(write_s=3600.0), TLS)
    app.router.add_post("/large", large)
    async with narrow(app) as url:
        reader = await readers(url, "/large")
        await until(lambda: asked)
        for _ in range(20):
            reader.ask("/large")
        for _ in range(3):
            assert await asyncio.wait_for(reader.read(1000), LIMIT_S)
            await asyncio.sleep(0.05)
        assert asked == 1
        while asked == 1:
            assert await asyncio.wait_for(reader.read(), LIMIT_S)


async def test_a_client_that_does_not_close_its_side_makes_room(
    directory: Path, readers: Callable[..., Awaitable[TlsReader]]
) -> None:
    """Connections that the server has closed wait for the client's part of that, but not if others need their place."""
    app = new_app(FrontMetrics(), HttpLimits(write_s=3600.0, head_s=3600.0, connections=3), TLS)
    connections: set[Any] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        connections.add(request.protocol)
        response = json_response("x")
        response.force_close()
        return response

    app.router.add_post("/", answer)
    async with narrow(app) as url:
        async with timeout(LIMIT_S):
            for _ in range(8):
                assert b"200" in await (await readers(url, "/")).read()
        await until(lambda: sum(one._open is not None for one in connections) <= 3)
        assert len(connections) == 8

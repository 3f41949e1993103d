"""Connections and descriptors: a server with too many connections, or without descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton.event_loop import timeout
from baton.openai.http import accepting
from baton.openai.http.limits import HttpLimits
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served, until

HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def app_of(directory: Path, engine: FakeEngine | None = None, **limits: Any) -> web.Application:
    return build_app(engine or FakeEngine(directory), Tokenizer.load(directory), HttpLimits(**limits))


@pytest.fixture
def connect() -> Iterator[Callable[[str], socket.socket]]:
    """Makes connections, and closes them at the end."""
    made: list[socket.socket] = []

    def make(url: str) -> socket.socket:
        made.append(socket.socket())
        made[-1].setblocking(False)
        host, port = url.removeprefix("http://").split(":")
        with contextlib.suppress(BlockingIOError):
            made[-1].connect((host, int(port)))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def status(client: socket.socket) -> bytes:
    """The status of the answer to HEALTH. Empty if the connection has ended."""
    loop = asyncio.get_running_loop()
    async with timeout(60):
        try:
            await loop.sock_sendall(client, HEALTH)
            return (await loop.sock_recv(client, 4096))[9:12]
        except ConnectionError:
            return b""


async def test_without_a_descriptor_left_the_log_stays_short(
    directory: Path, connect: Callable[[str], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is accepted as soon as there is a descriptor again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with served(app_of(directory)) as url:
        assert await status(connect(url)) == b"200"
        second = socket.socket()
        second.setblocking(False)
        host, port = url.removeprefix("http://").split(":")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            with contextlib.suppress(BlockingIOError):
                second.connect((host, int(port)))
            await until(lambda: caplog.records)
            began = time.monotonic()
            await asyncio.sleep(0.5)
            took = time.monotonic() - began
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert await status(second) == b"200"
        second.close()
    assert {record.name for record in caplog.records} == {"baton.openai.http.accepting"}
    assert len(caplog.records) <= 3 + took  # one a second
    assert all(record.exc_info is None and "Too many open files" in record.getMessage() for record in caplog.records)


async def test_idle_connections_make_room(directory: Path, connect: Callable[[str], socket.socket]) -> None:
    """Connections that have never sent a request go first, so that a client keeps its own."""
    async with served(app_of(directory, connections=4)) as url:
        kept = connect(url)
        assert await status(kept) == b"200"
        silent = [connect(url) for _ in range(20)]
        for _ in range(3):
            assert await status(connect(url)) == b"200"
        assert await status(kept) == b"200"
        ended = 0
        for one in silent:
            with contextlib.suppress(BlockingIOError):
                ended += one.recv(1) == b""
        assert ended >= 18


async def test_new_connections_wait_while_all_are_busy(
    directory: Path,
    session: aiohttp.ClientSession,
    connect: Callable[[str], socket.socket],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(directory, step_s=1e3)
    async with served(app_of(directory, engine, connections=2)) as url:
        body = {"prompt": "a", "max_tokens": 9}
        asked = [asyncio.create_task(session.post(f"{url}/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: engine.running == 2)
        waiting = asyncio.create_task(status(connect(url)))
        await until(lambda: "all 2 connections are busy" in caplog.text)
        assert engine.running == 2
        assert not waiting.done()
        asked[0].cancel()
        assert await waiting == b"200"
        assert engine.running == 1
        asked[1].cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize(("files", "expected"), [(10, 8), (364, 100), (2**20, 16384), (resource.RLIM_INFINITY, 16384)])
def test_few_files_leave_some_for_engines(monkeypatch: pytest.MonkeyPatch, files: Any, expected: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
    assert accepting.max_connections(HttpLimits()) == expected


async def test_a_handshake_that_fails_is_no_line_in_the_log(
    directory: Path, connect: Callable[[str], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    from baton.openai.http.access import Access
    from tests.openai.http.test_doors import CERT
    from tests.openai.http.test_doors import KEY as KEY_FILE

    access = Access(ssl_certfile=CERT, ssl_keyfile=KEY_FILE)
    app = build_app(FakeEngine(directory), Tokenizer.load(directory), HttpLimits(head_s=0.3, connections=3), access)
    async with served(app) as url:
        silent = [connect(url.replace("https", "http")) for _ in range(8)]
        loop = asyncio.get_running_loop()
        assert await status(connect(url.replace("https", "http"))) in (b"", b"\x02F\x00")
        async with timeout(60):  # the others time out or are closed for new ones
            for one in silent:
                with contextlib.suppress(ConnectionError):
                    assert await loop.sock_recv(one, 10) == b""
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_handshake_that_trickles_has_the_same_time(
    directory: Path, connect: Callable[[str], socket.socket]
) -> None:
    """A byte now and then does not make its time start anew."""
    from baton.openai.http.access import Access
    from tests.openai.http.test_doors import CERT
    from tests.openai.http.test_doors import KEY as KEY_FILE

    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=CERT).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    access = Access(ssl_certfile=CERT, ssl_keyfile=KEY_FILE)
    app = build_app(FakeEngine(directory), Tokenizer.load(directory), HttpLimits(head_s=0.3), access)
    async with served(app) as url:
        loop, trickling = asyncio.get_running_loop(), connect(url.replace("https", "http"))
        ended = asyncio.create_task(loop.sock_recv(trickling, 10))
        sent = 0
        while not ended.done() and sent < len(hello) - 1:
            await loop.sock_sendall(trickling, hello[sent : sent + 1])
            sent += 1
            await asyncio.sleep(0.05)
        assert sent < len(hello) - 1
        with contextlib.suppress(ConnectionError):
            assert await ended == b""

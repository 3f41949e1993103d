"""Connections that send half of something, nothing, or no HTTP; clients that read nothing; and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import logging
import socket
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol

from baton.openai.http.access import Access
from baton.openai.http.app import BODIES, DRAIN
from baton.openai.http.connections import ClientConnection
from baton.openai.http.limits import Bodies, HttpLimits
from baton.openai.http.serving import bind, serve_until, sigterm_handler, url_of
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import TEXT, FakeEngine, served, until
from tests.openai.http.test_doors import CERT, KEY, trusting

LIMIT_S = 60.0


def app_with(directory: Path, engine: FakeEngine | None = None, **limits: Any) -> web.Application:
    return build_app(engine or FakeEngine(directory), Tokenizer.load(directory), HttpLimits(**limits))


class Raw:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str, data: bytes = b"") -> Raw:
        parts = urlsplit(url)
        tls = {"ssl": trusting(), "server_hostname": "localhost"} if parts.scheme == "https" else {}
        raw = cls(*await asyncio.open_connection(parts.hostname, parts.port, **tls))
        raw.writer.write(data)
        return raw

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """The status and the JSON of everything until the server closes the connection."""
        answer = bytearray()

        async def read() -> None:
            while part := await self.reader.read(2**16):
                answer.extend(part)

        # Bytes sent to a server that has already closed reset the connection after the answer.
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(read(), LIMIT_S)
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        self.writer.close()
        return int(head.split()[1]), json.loads(body)


async def test_bodies_that_cannot_be_decoded_are_refused(
    directory: Path, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is logged: an attacker could fill the log. With and without a declared length."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    async with served(app_with(directory)) as url:
        for data, expected in (
            (head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nwhat?\r\n", b"400"),
            (head + b"Content-Length: 99999999999\r\n\r\n{", b"413"),
        ):
            raw = await Raw.open(url, data)
            answer = await asyncio.wait_for(raw.reader.readuntil(b"}}"), LIMIT_S)
            assert answer.split()[1] == expected, data
            raw.writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
async def test_compressed_bodies_are_refused_and_never_decompressed(
    directory: Path, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, coding: str
) -> None:
    """On any route, with and without a key: nothing in the request bounds the decompressed size."""
    for name in ("decompressobj", "decompress"):
        monkeypatch.setattr(zlib, name, Mock(side_effect=AssertionError("something is decompressed")))
    app = build_app(FakeEngine(directory), Tokenizer.load(directory), access=Access(api_keys=("key",)))
    body = gzip.compress(b" " * 2**22 + b"{}")
    async with served(app) as url:
        for path, key, expected in (
            ("/v1/completions", "key", 415),
            ("/v1/completions", "other", 401),
            ("/nowhere", "key", 404),
            ("/health", "other", 405),
            ("/inference/v1/generate", "other", 415),
            ("/tokenize", "key", 415),
        ):
            headers = {"Content-Encoding": coding, "Authorization": f"Bearer {key}"}
            async with session.post(url + path, data=body, headers=headers) as response:
                assert response.status == expected, path
                message = (await response.json())["error"]["message"]
                assert expected != 415 or message.startswith("Content-Encoding: ")
        headers = {"Content-Encoding": "Identity", "Authorization": "Bearer key"}
        async with session.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 200


async def test_half_sent_requests_end(directory: Path) -> None:
    async with served(app_with(directory, head_s=0.5)) as url:
        # An idle connection between two requests is not one of them.
        health = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        idle = await Raw.open(url, health)
        await idle.reader.readuntil(b" 200 ")

        async def ended(start: bytes, trickles: bool) -> tuple[int, dict[str, Any]]:
            raw = await Raw.open(url, start)
            # Reads from the beginning: unread answers are lost when a connection is reset.
            answer = asyncio.create_task(raw.answer())
            while trickles and not answer.done():
                # Single bytes now and then do not restart the timeout.
                raw.writer.write(b"a")
                await asyncio.sleep(0.05)
            return await answer

        starts = (b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
        many = [(start, False) for start in starts for _ in range(5)] + [(starts[-1], True)] * 5
        for status, body in await asyncio.gather(*itertools.starmap(ended, many)):
            assert status == 408
            assert body["error"]["type"] == "invalid_request_error"
        idle.writer.write(health)
        await asyncio.wait_for(idle.reader.readuntil(b" 200 "), LIMIT_S)
        idle.writer.close()


async def test_malformed_http_is_one_line_and_answered(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(app_with(directory)) as url:
        starts = (
            b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /\r\nno header\r\n\r\n",
            b"\r\n" * 2,
        )
        for data in starts:
            caplog.clear()
            raw = await Raw.open(url, data + b"X: " + b"y" * 20_000 + b"\r\n\r\n")
            status, body = await raw.answer()
            assert status == 400
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["message"].startswith("malformed HTTP")
            (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
            assert record.exc_info is None
            assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("path", "tls", "most"),
    [
        ("/nowhere", {}, 2**14),
        ("/v1/completions", {}, 2**14),
        # What is read at once may complete a TLS record of that size.
        ("/v1/completions", {"ssl_certfile": CERT, "ssl_keyfile": KEY}, 2**15),
    ],
)
async def test_the_rest_of_a_refused_body_is_not_parsed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, path: str, tls: dict[str, str], most: int
) -> None:
    """Unauthorised clients could keep the event loop busy with it: one-byte chunks cost as much as chunks of kilobytes.
    No connection has a long turn either.
    """
    sizes: list[int] = []
    received = ClientConnection.data_received

    def data_received(self: ClientConnection, data: bytes) -> None:
        sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(ClientConnection, "data_received", data_received)
    parsed = 0
    begin = aiohttp.StreamReader.begin_http_chunk_receiving

    def begin_chunk(self: aiohttp.StreamReader) -> None:
        nonlocal parsed
        parsed += 1
        begin(self)

    monkeypatch.setattr(aiohttp.StreamReader, "begin_http_chunk_receiving", begin_chunk)
    access = Access(api_keys=("key",), **tls)
    app = build_app(FakeEngine(directory), Tokenizer.load(directory), access=access)
    async with served(app) as url:
        raw = await Raw.open(url, f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        head = await raw.reader.readuntil(b"\r\n\r\n")
        assert b"Connection: close" in head
        raw.writer.write(b"1\r\nx\r\n" * 20_000)
        await until(lambda: sum(sizes) > 120_000)
        raw.writer.close()
    assert parsed == 0
    assert max(sizes) <= most


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def test_a_stream_to_an_old_client_ends_with_its_connection(directory: Path) -> None:
    """HTTP/1.0 has no chunks, and the client wants to keep the connection."""
    async with served(build_app(FakeEngine(directory), Tokenizer.load(directory))) as url:
        place, body = urlsplit(url), b'{"prompt": "a", "stream": true}'
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        head = f"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_slow_bodies_end(directory: Path, session: aiohttp.ClientSession) -> None:
    engine = FakeEngine(directory)
    async with served(app_with(directory, engine, body_s=0.5)) as url:
        many = [await Raw.open(url, POST % 1000 + b'{"prompt"') for _ in range(20)]
        for raw in many:
            status, body = await raw.answer()
            assert status == 408
            assert body["error"]["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_client_that_leaves_as_the_body_ends_is_cancelled(turns: int) -> None:
    """A cancellation at the end of the body is not lost: otherwise the request would wait for its turn forever."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(Mock(spec=asyncio.Transport))
    content = aiohttp.StreamReader(protocol, 2**16, loop=loop)
    bodies = Bodies(HttpLimits())

    async def handle() -> None:
        async with bodies.read(cast("web.Request", SimpleNamespace(content=content, content_length=2, headers={}))):
            await asyncio.sleep(3600)

    task = asyncio.create_task(handle())
    await asyncio.sleep(0.01)
    content.feed_data(b"{}")
    content.feed_eof()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()
    assert bodies.num_bytes == 0


async def test_bodies_share_a_bound(directory: Path, session: aiohttp.ClientSession) -> None:
    app = app_with(directory, bodies_bytes=1_000_000, body_s=LIMIT_S)
    async with served(app) as url:
        many = [await Raw.open(url, POST % 900_000 + b" " * 300_000) for _ in range(3)]
        await until(lambda: app[BODIES].num_bytes == 900_000)
        fits = {"prompt": "a", "max_tokens": 3, "user": "u" * 200_000}
        async with session.post(f"{url}/v1/completions", json=fits) as response:
            assert response.status == 200, "a client that stalls keeps nobody out"
        assert app[BODIES].num_bytes == 600_000
        answers = [asyncio.create_task(raw.reader.read()) for raw in many]
        pushed_out, _ = await asyncio.wait(answers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert [b" 429 " in one.result() and b"Retry-After" in one.result() for one in pushed_out] == [True]
        for one in answers:
            one.cancel()
        async with session.post(f"{url}/v1/completions", data=b" " * 950_000) as response:
            assert response.status == 429, "now it is the largest"
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "overloaded"
        assert app[BODIES].num_bytes == 600_000
        for raw in many:
            raw.writer.close()
        await until(lambda: app[BODIES].num_bytes == 0)
        async with session.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}) as response:
            assert response.status == 200


class Ending:
    def __init__(self, directory: Path, step_s: float, shutdown_timeout_s: float) -> None:
        self.engine = FakeEngine(directory, step_s=step_s)
        self.app = build_app(self.engine, Tokenizer.load(directory))
        self.asked, self.ended = asyncio.Event(), asyncio.Event()
        listener = bind("127.0.0.1", 0)
        self.url = url_of(listener)
        ready = asyncio.Event()
        self.task = asyncio.create_task(
            serve_until(self.asked, self.ended, self.app, listener, ready.set, shutdown_timeout_s)
        )
        self.ready = ready

    async def stream(self, session: aiohttp.ClientSession) -> list[str]:
        body = {"prompt": "a", "max_tokens": 40, "stream": True}
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200
            return [line[6:].decode().strip() async for line in response.content if line.startswith(b"data: ")]


async def test_a_server_that_ends_lets_streams_run(directory: Path, session: aiohttp.ClientSession) -> None:
    server = Ending(directory, step_s=1.0, shutdown_timeout_s=LIMIT_S)
    await server.ready.wait()
    health = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    idle = await Raw.open(server.url, health)
    assert b" 200 " in await idle.reader.readuntil(b"\r\n\r\n")
    streams = [asyncio.create_task(server.stream(session)) for _ in range(3)]
    await until(lambda: server.engine.running == 3)
    server.asked.set()
    await until(lambda: server.app[DRAIN].begun)
    idle.writer.write(health)
    assert b" 503 " in await idle.reader.readuntil(b"\r\n\r\n"), "on a connection that it has"
    async with aiohttp.ClientSession() as other:
        with pytest.raises(aiohttp.ClientConnectorError):
            await other.get(f"{server.url}/health")
    server.engine.step_s = 0.0
    for events in await asyncio.gather(*streams):
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == TEXT.encode()[:40].decode()
        assert events[-1] == "[DONE]"
    await asyncio.wait_for(server.task, LIMIT_S / 2)
    idle.writer.close()


@pytest.mark.parametrize("how", ["timeout", "at once"])
async def test_requests_that_run_at_the_shutdown_get_an_error(
    directory: Path, session: aiohttp.ClientSession, how: str
) -> None:
    server = Ending(directory, step_s=5.0, shutdown_timeout_s=0.3 if how == "timeout" else 1000.0)
    await server.ready.wait()
    stream = asyncio.create_task(server.stream(session))
    body = {"prompt": "a", "max_tokens": 40}
    whole = asyncio.create_task(session.post(f"{server.url}/v1/completions", json=body))
    await until(lambda: server.engine.running == 2)
    (server.asked if how == "timeout" else server.ended).set()
    events = await stream
    assert json.loads(events[-2])["error"]["message"] == "this server is shutting down"
    assert events[-1] == "[DONE]"
    async with await whole as response:
        assert response.status == 503
        assert (await response.json())["error"]["type"] == "service_unavailable_error"
    await asyncio.wait_for(server.task, LIMIT_S)
    assert server.engine.running == 0


async def test_clients_that_vanish_are_noticed(session: aiohttp.ClientSession) -> None:
    async def keeps_alive(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        return web.Response(text=str(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)))

    app = web.Application()
    app.router.add_get("/", keeps_alive)
    async with served(app) as url, session.get(url) as response:
        assert await response.text() == "1"


def test_an_echo_of_a_signal_does_not_hurry() -> None:
    """GNU's `timeout` sends SIGTERM to the process and then to its group."""
    now, asked, ended = [50.0], asyncio.Event(), asyncio.Event()
    terminate = sigterm_handler(asked, ended, lambda: now[0])
    for now[0], hurried in ((50.0, False), (50.001, False), (50.9, False), (51.0, True)):
        terminate()
        assert (asked.is_set(), ended.is_set()) == (True, hurried)


@pytest.mark.parametrize(("host", "loud"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_listening_beyond_the_host_is_said_loudly(host: str, loud: bool, caplog: pytest.LogCaptureFixture) -> None:
    bind(host, 0).close()
    assert ("LISTENING BEYOND THIS HOST" in caplog.text) == loud

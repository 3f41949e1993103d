"""A client that reads slowly or not at all only affects its own connection: no place in the engine, and
bounded memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.http import StreamWriter

from baton.event_loop import timeout
from baton.openai import FrontMetrics
from baton.openai.http import serving
from baton.openai.http.access import OPEN, Access
from baton.openai.http.app import DRAIN, json_response, new_app, send_answer
from baton.openai.http.connections import ClientConnection, Stream, WriteBacklog
from baton.openai.http.limits import HttpLimits
from baton.openai.http.serving import bind, url_of
from baton.openai.streams import LastEvents
from baton.router import RouterConfig
from baton.router import build_app as build_router
from baton.server import build_app
from baton.text import Tokenizer
from testkit.clients.reader import Reader
from testkit.servers.fake_serving import KEY, FakeEngine, complete, served, until

LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def narrow(app: web.Application) -> AsyncIterator[str]:
    """Serve `app` over sockets with small kernel buffers."""
    listener = bind("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with serving.served(app, listener):
        yield url_of(listener, app)


def app_of(engine: FakeEngine, directory: Path, access: Access = OPEN, **limits: Any) -> web.Application:
    return build_app(engine, Tokenizer.load(directory), HttpLimits(**limits), access)


@contextlib.asynccontextmanager
async def fronts(
    directory: Path, front: str, access: Access = OPEN, **limits: Any
) -> AsyncIterator[tuple[str, list[FakeEngine]]]:
    """A server for clients, and the engines behind it, which decode two of these requests at once."""
    async with contextlib.AsyncExitStack() as stack:
        handed: dict[bytes, asyncio.Future[str]] = {}
        roles = ["both"] if front != "pair" else ["prefill", "decode"]
        engines = [FakeEngine(directory, role=role, handed=handed, accept=0) for role in roles]
        for engine in engines:
            engine.info = msgspec.structs.replace(engine.info, max_num_seqs=2, max_model_len=2048)
        if front == "engine":
            yield await stack.enter_async_context(narrow(app_of(engines[0], directory, access, **limits))), engines
            return
        urls = [await stack.enter_async_context(served(app_of(engine, directory))) for engine in engines]
        roles_of = {role: (url,) for role, url in zip(roles, urls, strict=True)}
        config: dict[str, Any] = {"limits": HttpLimits(**limits), "access": access, **roles_of}
        app = await build_router(RouterConfig(ticket_key=KEY, **config))
        yield await stack.enter_async_context(narrow(app)), engines


def app_of_endless_streams(ended: list[str], access: Access = OPEN) -> web.Application:
    """Notes the paths of streams that end."""

    async def endless(request: web.Request) -> web.StreamResponse:
        response = Stream()
        try:
            while True:
                await response.send(request, b" " * 1000)
                await asyncio.sleep(0.01)
        finally:
            ended.append(request.path)

    app = new_app(FrontMetrics(), HttpLimits(write_s=0.4), access)
    app.router.add_post("/{name}", endless)
    return app


def app_of_large_answers(sockets: list[Any], size: int, close: bool, access: Access = OPEN) -> web.Application:
    """Notes the sockets of requests."""

    async def large(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        sockets.append(request.transport.get_extra_info("socket"))
        response = json_response("x" * size)
        if close:
            response.force_close()
        return response

    app = new_app(FrontMetrics(), HttpLimits(write_s=0.3), access)
    app.router.add_post("/large", large)
    return app


@pytest.mark.parametrize("front", ["engine", "router", "pair"])
async def test_streams_that_nobody_reads_hold_no_place(
    directory: Path, session: aiohttp.ClientSession, readers: Callable[..., Reader], front: str
) -> None:
    """There are four times as many as are decoded at once. None is cut off, an honest request is answered, and a late
    reader gets everything.
    """
    async with fronts(directory, front, write_s=3600.0) as (url, engines):
        engines[-1].accept = 3  # few turns of the event loop: each may take long
        many = [readers(url) for _ in range(8)]
        async with timeout(LIMIT_S):
            await until(lambda: engines[-1].outcomes["length"] == 8)
            status, answer = await complete(session, url, max_tokens=2)
            assert status == 200, answer
            assert all(engine.running == 0 for engine in engines)
            texts = await asyncio.gather(*(reader.text() for reader in many))
        assert len({text.count(b"data: ") for text in texts}) == 1
        assert all(b"data: [DONE]" in text for text in texts)


@pytest.mark.parametrize("front", ["engine", "router"])
async def test_a_stream_that_nobody_reads_is_aborted_in_time(
    directory: Path, readers: Callable[..., Reader], front: str
) -> None:
    async with fronts(directory, front, write_s=0.3) as (url, engines):
        engines[0].step_s = 0.01
        many = [readers(url) for _ in range(2)]
        await until(lambda: engines[0].outcomes["aborted"] == 2)
        async with timeout(LIMIT_S):
            await asyncio.gather(*(reader.until_cut() for reader in many))


async def test_unread_bytes_of_one_reader_are_bounded(directory: Path, readers: Callable[..., Reader]) -> None:
    """Even if the reader still had time."""
    async with fronts(directory, "engine", write_s=3600.0, stream_bytes=100_000) as (url, engines):
        reader = readers(url)
        await until(lambda: engines[0].outcomes["aborted"] == 1)
        async with timeout(LIMIT_S):
            await reader.until_cut()


async def test_unread_bytes_of_all_readers_are_bounded(
    directory: Path, session: aiohttp.ClientSession, readers: Callable[..., Reader]
) -> None:
    """The connections with most unread bytes are cut off, not an honest one that comes then."""
    async with fronts(directory, "engine", write_s=3600.0, unread_bytes=1_200_000) as (url, engines):
        many = [readers(url) for _ in range(6)]
        await until(lambda: engines[0].outcomes.total() == 6)
        assert (await complete(session, url, max_tokens=1000, logprobs=5))[0] == 200
        async with timeout(LIMIT_S):
            ends = await asyncio.gather(*(reader.text() for reader in many), return_exceptions=True)
        cut = [end for end in ends if isinstance(end, ConnectionResetError)]
        assert 0 < len(cut) < 6
        assert all(isinstance(end, bytes) for end in ends if end not in cut)


async def test_a_slow_reader_is_cut_off_and_a_fast_one_is_not(readers: Callable[..., Reader]) -> None:
    ended: list[str] = []
    async with narrow(app_of_endless_streams(ended)) as url:
        trickles = asyncio.create_task(readers(url, "/trickles").until_cut(10, 0.01))
        keeps_up = asyncio.create_task(readers(url, "/keeps-up").until_cut())
        await until(lambda: ended)
        assert ended == ["/trickles"]
        for task in (trickles, keeps_up):
            task.cancel()
        await asyncio.gather(trickles, keeps_up, return_exceptions=True)


async def test_a_slow_reader_has_time_for_each_byte_and_no_less() -> None:
    """A reader that is always late, but never by `write_s`, is not cut off."""
    transport = Mock(spec=asyncio.Transport)
    writer = Mock(spec=StreamWriter)
    waiting = 0

    async def write(data: bytes, drain: bool) -> None:
        nonlocal waiting
        waiting += len(data)

    writer.write = write
    transport.get_write_buffer_size = lambda: waiting
    transport.get_extra_info = lambda name: None
    server = web.Server(Mock(), handler_cancellation=True)
    unread = WriteBacklog(HttpLimits())
    connection = ClientConnection(server, HttpLimits(write_s=3600.0), unread)
    connection.connection_made(transport)
    waiting = 100
    connection.pause_writing()
    for _ in range(5):
        await connection.send(writer, b" " * 150)
        waiting -= 150
        connection._check_progress()
        assert not transport.abort.called
    await connection.send(writer, b" " * 150)
    assert unread.num_bytes == 250
    waiting -= 99  # of the 100 that waited at the last check
    connection._check_progress()
    assert transport.abort.called
    connection.connection_lost(None)
    assert unread.num_bytes == 0


@pytest.mark.parametrize("close", [True, False])
async def test_whole_answers_that_nobody_reads_are_cut_off_too(close: bool, readers: Callable[..., Reader]) -> None:
    """However many requests were pipelined, one answer waits, and not forever; also on a closing connection."""
    sockets: list[Any] = []
    async with narrow(app_of_large_answers(sockets, 2**20, close)) as url:
        reader = readers(url, "/large")
        for _ in range(20):
            reader.ask("/large")
        await until(lambda: sockets and sockets[0].fileno() == -1)
        assert len(sockets) == 1


async def test_a_shutdown_adds_nothing_to_an_answer_that_has_ended() -> None:
    """Its client has yet to read it."""
    app = new_app(FrontMetrics())

    async def events() -> AsyncGenerator[bytes, None]:
        yield LastEvents(b"x" * 2**21)

    async def big(request: web.Request) -> web.StreamResponse:
        return await send_answer(request, events())

    app.router.add_get("/big", big)
    async with narrow(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /big HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"x")
        app[DRAIN].end()
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
    assert answer.endswith(b"x\r\n0\r\n\r\n")

"""The connections of legs: answers in any pieces, connections that are used again, and those that must not be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import EngineUnavailableError, ProtocolError, RequestError
from baton.openai.http.tracing import TRACE, Trace
from baton.router.clients.engine_client import BatonClient, LegConnector, new_session
from baton.router.clients.http_answer import HttpAnswer
from baton.router.clients.leg_connections import LegConnections
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.timeouts import timeout
from baton.wire import GenerateRequest, PromptIds, TokenChunk

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
LINES = b'{"request_id":"r","token_ids":[7],"position":0}\n{"request_id":"r","finish_reason":"stop"}\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Served = tuple[BatonClient, list[asyncio.StreamWriter], LegConnections]


def in_chunks(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


BODY = bytes(range(256)) * 2
ANSWERS = {
    "chunks": (CHUNKED + in_chunks(BODY, 100), True),
    "chunks with extensions and trailers": (
        CHUNKED + b"3;name=value\r\n" + BODY[:3] + b"\r\n" + in_chunks(BODY[3:], 300, b"A: b\r\nC: d\r\n"),
        True,
    ),
    "a length": (b"HTTP/1.1 200 OK\r\ncontent-length:%d\r\n\r\n" % len(BODY) + BODY, True),
    "after others": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 A\r\nB: c\r\n\r\n" + CHUNKED + in_chunks(BODY, 7),
        True,
    ),
    "the last": (b"HTTP/1.1 200\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY, False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY, False),
    "and more": (CHUNKED + in_chunks(BODY, 100) + b"more", False),
    "a length and more": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY + b"more", False),
}


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=st.lists(st.integers(0, 700), max_size=20))
def test_an_answer_is_the_same_in_any_pieces(name: str, cuts: list[int]) -> None:
    data, keeps_open = ANSWERS[name]
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    answer = HttpAnswer()
    body = b"".join(answer.feed(data[start:stop]) for start, stop in pairwise(places))
    assert (answer.status, body, answer.is_whole, answer.keeps_open) == (200, BODY, True, keeps_open)


@pytest.mark.parametrize("name", [name for name, (_, keeps_open) in ANSWERS.items() if keeps_open])
def test_a_cut_answer_is_not_whole(name: str) -> None:
    data, _ = ANSWERS[name]
    for stop in range(len(data)):
        answer = HttpAnswer()
        answer.feed(data[:stop])
        assert not answer.is_whole
        assert not answer.end()


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    answer = HttpAnswer()
    assert answer.feed(b"HTTP/1.1 200 OK\r\n\r\nab") + answer.feed(b"c") == b"abc"
    assert (answer.is_whole, answer.end(), answer.is_whole, answer.keeps_open) == (False, True, True, False)


@pytest.mark.parametrize("status", [204, 304])
def test_some_answers_have_no_body(status: int) -> None:
    answer = HttpAnswer()
    assert answer.feed(b"HTTP/1.1 %d None\r\n\r\n" % status) == b""
    assert answer.is_whole


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno field\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        CHUNKED + b"0x1\r\na\r\n",
        CHUNKED + b"-1\r\na\r\n",
        CHUNKED + b"\r\na\r\n",
        CHUNKED + b"1\r\nab\r\n",
        CHUNKED + b"1" * 5000,
        CHUNKED + b"1" * 16 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 2**16 + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        HttpAnswer().feed(data)


@contextlib.asynccontextmanager
async def server(serve: Serve, keep_s: float = 3.0) -> AsyncIterator[Served]:
    """A client of a server that calls `serve` for each connection, the server's connections so far, and its own."""
    connections: list[asyncio.StreamWriter] = []
    ended: list[asyncio.Event] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        ended.append(over := asyncio.Event())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        over.set()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening:
        async with new_session() as session:
            assert isinstance(session.connector, LegConnector)
            legs = session.connector.legs
            legs.keep_s = keep_s
            yield BatonClient(session, f"http://127.0.0.1:{port}", RouterTimers()), connections, legs
        async with timeout(10):
            for one in ended:
                await one.wait()


async def until_closed(legs: LegConnections) -> None:
    """Wait until the client has no open connection."""
    async with timeout(10):
        while any(one.is_open for idle in legs.idle.values() for one in idle):
            await asyncio.sleep(0.001)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return head


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await read_request(reader)
        writer.write(CHUNKED + in_chunks(LINES, 30))


async def leg(client: BatonClient, request: GenerateRequest = REQUEST) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(request)]


async def test_a_connection_serves_one_leg_after_the_other() -> None:
    async with server(answer_all) as (client, connections, _):
        for _ in range(3):
            assert [chunk.finish_reason for chunk in await leg(client)] == [None, "stop"]
        assert len(connections) == 1
        await asyncio.gather(*(leg(client) for _ in range(3)))
        assert len(connections) == 3


async def test_an_idle_connection_is_closed_before_the_server_does() -> None:
    async with server(answer_all, keep_s=0.0) as (client, connections, legs):
        await leg(client)
        await until_closed(legs)
        await leg(client)
        assert len(connections) == 2


async def test_a_connection_that_the_server_has_closed_gets_no_leg() -> None:
    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + in_chunks(LINES, 30))

    async with server(answer_one) as (client, connections, legs):
        for number in range(3):
            await leg(client)
            await until_closed(legs)
            assert len(connections) == number + 1


async def test_a_leg_that_is_left_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def answer_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + in_chunks(LINES, 48)[:-40])
        await reader.read()
        gone.set()

    async with server(answer_half) as (client, connections, _):
        chunks = client.generate(REQUEST)
        assert (await anext(chunks)).token_ids == [7]
        await chunks.aclose()
        await asyncio.wait_for(gone.wait(), 10)
        assert len(connections) == 1


async def test_more_than_was_asked_for_closes_a_connection() -> None:
    async def answer_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(2 * (CHUNKED + in_chunks(LINES, 30)))
        await reader.read()

    async with server(answer_twice) as (client, connections, _):
        for _ in range(2):
            await leg(client)
        assert len(connections) == 2


async def test_a_long_prompt_waits_for_a_slow_server_and_stops_at_a_refusal() -> None:
    asked = GenerateRequest(
        request_id="r", prompt_token_ids=PromptIds([100_000] * 1_000_000), sampling_params=SamplingParams()
    )
    sizes = []

    async def read_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        sizes.append(len(await read_request(reader)))
        writer.write(CHUNKED + in_chunks(LINES, 30))

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        told = b'{"error": {"message": "no room"}}'
        writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(told) + told)
        await writer.drain()
        await reader.read(1)

    async with server(read_slowly) as (client, _, _):
        assert len(await leg(client, asked)) == 2
        assert len(sizes) == 1
    async with server(refuse) as (client, _, _):
        with pytest.raises(RequestError, match="no room"):
            await leg(client, asked)


async def test_a_body_that_is_not_read_stops_the_server() -> None:
    """The server sends until buffers are full, and goes on when the client reads."""
    line = b'{"request_id":"r","token_ids":[7],"position":0,"x":"' + b"y" * 10**6 + b'"}\n'
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(CHUNKED)
        for _ in range(40):
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            await writer.drain()
            sent += 1
        writer.write(in_chunks(LINES, 30))

    async with server(answer) as (client, _, _):
        chunks = client.generate(REQUEST)
        await anext(chunks)
        before = -1
        while before < sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 30
        assert len([chunk async for chunk in chunks]) == 41


async def test_a_header_with_a_line_break_is_not_sent() -> None:
    async with server(answer_all) as (client, connections, _):
        before = TRACE.set(Trace("00-" + "1" * 32 + "-" + "2" * 16 + "-01", "a=b\r\nX: y"))
        try:
            with pytest.raises(ProtocolError, match="line break"):
                await leg(client)
        finally:
            TRACE.reset(before)
        assert connections == []


async def test_who_is_refused_has_sent_nothing() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        async with new_session() as session:
            client = BatonClient(session, f"http://127.0.0.1:{unheard.getsockname()[1]}", RouterTimers())
            with pytest.raises(EngineUnavailableError, match="Connect call failed") as raised:
                await leg(client)
    assert type(raised.value) is EngineUnavailableError

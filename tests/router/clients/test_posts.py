"""Connections of legs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from baton.errors import EngineLostError, EngineUnavailableError, OverloadedError
from baton.openai.http.serving import bind
from baton.openai.http.tracing import TRACE, Trace
from baton.router.clients.engine_client import BatonClient, new_session
from baton.router.clients.posts import Posts
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
LINE = b'{"request_id":"r","token_ids":[7],"position":0,"finish_reason":"stop"}\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(LINE), LINE)
WHOLE = CHUNKED + b"0\r\n\r\n"
Answering = Callable[["Peer", int], Awaitable[bool]]


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heads: list[bytes]) -> None:
        self.reader, self.writer, self.heads = reader, writer, heads

    async def read_head(self) -> int:
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        return int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


@contextlib.asynccontextmanager
async def server(answer: Answering) -> AsyncIterator[tuple[BatonClient, list[Peer], list[bytes]]]:
    """`answer`: False closes the connection."""
    peers: list[Peer] = []
    heads: list[bytes] = []
    tasks: list[asyncio.Task[object] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, heads)
        peers.append(peer)
        tasks.append(asyncio.current_task())
        number = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await answer(peer, number):
                number += 1
        writer.close()

    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(serve, sock=listener), new_session() as session:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield BatonClient(session, url, RouterTimers()), peers, heads
        finally:
            await session.close()
            await asyncio.gather(*filter(None, tasks))


async def leg(client: BatonClient, request: GenerateRequest = REQUEST) -> list[int]:
    return [token async for chunk in client.generate(request) for token in chunk.token_ids]


async def whole(peer: Peer, number: int) -> bool:
    await peer.reader.readexactly(await peer.read_head())
    peer.writer.write(WHOLE)
    return True


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        CHUNKED + b"0\r\nX-Checksum: 1\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + WHOLE,
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(LINE), LINE),
    ],
    ids=["chunked", "trailers", "interim", "length"],
)
async def test_a_connection_is_used_again_after_a_whole_response(answer: bytes) -> None:
    async def serve(peer: Peer, number: int) -> bool:
        await peer.reader.readexactly(await peer.read_head())
        for place in range(0, len(answer), 7):
            peer.writer.write(answer[place : place + 7])
            await asyncio.sleep(0)
        return True

    async with server(serve) as (client, peers, _):
        assert [await leg(client) for _ in range(3)] == [[7]] * 3
    assert len(peers) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
async def test_a_connection_that_its_server_closes_is_not_used_again(head: bytes) -> None:
    async def serve(peer: Peer, number: int) -> bool:
        await peer.reader.readexactly(await peer.read_head())
        peer.writer.write(head + b"\r\n" + LINE)
        return False

    async with server(serve) as (client, peers, _):
        assert [await leg(client) for _ in range(2)] == [[7]] * 2
    assert len(peers) == 2


async def test_a_connection_closed_while_idle_costs_no_leg() -> None:
    async with server(whole) as (client, peers, _):
        assert await leg(client) == [7]
        peers[0].writer.close()
        for _ in range(5):
            await asyncio.sleep(0.01)  # a turn of the event loop: in one of them the client sees the end
        assert await leg(client) == [7]
    assert len(peers) == 2


async def test_a_leg_that_meets_a_closing_connection_is_not_sent_twice() -> None:
    async def serve(peer: Peer, number: int) -> bool:
        if number:
            await peer.read_head()
            return False
        return await whole(peer, number)

    async with server(serve) as (client, peers, heads):
        assert await leg(client) == [7]
        with pytest.raises(EngineLostError):
            await leg(client)
    assert len(peers) == 1
    assert len(heads) == 2


@pytest.mark.parametrize("begun", [b"", CHUNKED[:20], CHUNKED.replace(b',"finish_reason":"stop"', b"")])
async def test_a_cancelled_leg_closes_its_connection(begun: bytes) -> None:
    closed = asyncio.Event()

    async def serve(peer: Peer, number: int) -> bool:
        await peer.reader.readexactly(await peer.read_head())
        peer.writer.write(begun)
        assert await peer.reader.read() == b""
        closed.set()
        return False

    async with server(serve) as (client, _, heads):
        task = asyncio.create_task(leg(client))
        while not heads:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait_for(closed.wait(), 60.0)


async def test_a_refusal_before_the_body_is_read_ends_its_connection() -> None:
    refusal = b"HTTP/1.1 429 Busy\r\nContent-Length: 2\r\n\r\n{}"
    long = GenerateRequest(request_id="r", prompt_token_ids=[1] * 2**22, sampling_params=SamplingParams())

    async def serve(peer: Peer, number: int) -> bool:
        if len(peers) > 1:
            return await whole(peer, number)
        await peer.read_head()
        peer.writer.write(refusal)
        await asyncio.sleep(0.05)
        return False

    async with server(serve) as (client, peers, _):
        with pytest.raises((OverloadedError, EngineLostError)):
            await leg(client, long)
        assert await leg(client) == [7]
        assert await leg(client, long) == [7]
    assert len(peers) == 2


async def test_what_a_leg_says_about_itself() -> None:
    async with server(whole) as (client, _, heads):
        await leg(client)
        token = TRACE.set(Trace("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "v=1"))
        await leg(client)
        TRACE.reset(token)
    plain, traced = ([line.lower() for line in head.decode().split("\r\n")] for head in heads)
    assert plain[0] == "post /inference/v1/generate http/1.1"
    names = [line.partition(":")[0] for line in plain[1:] if line]
    assert sorted(names) == sorted(set(names))
    assert {"accept-encoding: identity", "content-type: application/json"} < set(plain)
    assert {"host", "content-length"} < set(names)
    assert set(traced) - set(plain) == {"traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate: v=1"}


async def test_nobody_who_takes_no_connection_is_waited_for() -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen(0)
    address = listener.getsockname()
    async with new_session() as session:
        fillers = [asyncio.create_task(asyncio.open_connection(*address)) for _ in range(3)]
        await asyncio.sleep(0.05)
        client = BatonClient(session, f"http://127.0.0.1:{address[1]}", RouterTimers(connect=0.1))
        with pytest.raises(EngineUnavailableError) as raised:
            await leg(client)
        assert type(raised.value) is EngineUnavailableError
        for filler in fillers:
            filler.cancel()
        for made in await asyncio.gather(*fillers, return_exceptions=True):
            if isinstance(made, tuple):
                made[1].close()
    listener.close()


async def test_a_closed_session_sends_nothing() -> None:
    session = new_session()
    posts = Posts(session, "http://127.0.0.1:1", {})
    await session.close()
    with pytest.raises(aiohttp.ClientError, match="the session is closed"):
        await posts.send("/", [b"{}"], {}, aiohttp.ClientTimeout(), 2**16)

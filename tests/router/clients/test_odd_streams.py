"""Odd responses of vLLM and SGLang servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest

from baton.errors import EngineLostError, HandoffError
from baton.openai.http.serving import bind
from baton.router.clients.engine_client import new_session
from baton.router.clients.sglang_client import SglangClient
from baton.router.clients.vllm_client import VllmClient
from baton.router.leg_tasks import Chunks
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, TokenChunk

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=4))
TOKENS = [5, 6, 7, 8]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE, END = b"data: [DONE]\n\n", b"0\r\n\r\n"
LAST = {"choices": [{"token_ids": [8], "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


FIRST = [event({"choices": [{"token_ids": [token], "finish_reason": None}]}) for token in TOKENS[:3]]
ANSWER = [*FIRST, event(LAST)]


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


@contextlib.asynccontextmanager
async def server(packets: Sequence[bytes], closes: bool) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """Answers each request with `packets`; its URL, and its connections so far."""
    connections: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                for packet in (HEAD, *packets):
                    if writer.is_closing():
                        return
                    writer.write(packet)
                    await asyncio.sleep(0.001 if len(packets) < 50 else 0)
                if closes:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(serve, sock=listener):
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
        finally:
            for writer in connections:
                writer.close()
            await asyncio.gather(*filter(None, tasks))


async def read(leg: Chunks, takes: bool) -> list[int]:
    """The leg's tokens, by the short cut if `takes`."""
    found: list[int] = []

    def take(chunk: TokenChunk) -> bool:
        found.extend(chunk.token_ids)
        return True

    with contextlib.suppress(StopAsyncIteration):
        chunk = await anext(leg)
        while True:
            found += chunk.token_ids
            chunk = await leg.asend(take if takes else None)
    return found


async def tokens(packets: Sequence[bytes], closes: bool = False, takes: bool = True, times: int = 1) -> int:
    """The number of connections of `times` legs."""
    async with server(packets, closes) as (url, connections), new_session() as session:
        client = VllmClient(session, url, RouterTimers(), AsyncMock())
        client._served = AsyncMock(return_value="demo")  # type: ignore[method-assign]
        for _ in range(times):
            assert await read(client.leg(REQUEST), takes) == TOKENS
    return len(connections)


WHOLE = chunked(*ANSWER, DONE) + END
PING, OTHER = b": ping\n\n", b"data:\n\n\n\r\n"
ODD = {
    "bytes": [WHOLE[place : place + 1] for place in range(len(WHOLE))],
    "bytes in chunks": [chunked(bytes([byte])) for byte in b"".join(ANSWER) + DONE] + [END],
    "one packet": [WHOLE],
    "CRLF": [chunked(part.replace(b"\n", b"\r\n")) for part in (*ANSWER, DONE)] + [END],
    "comments and empty events": [chunked(PING, part, OTHER) for part in (*ANSWER, DONE)] + [END],
    "no blank after data": [chunked(part.replace(b"data: ", b"data:")) for part in (*ANSWER, DONE)] + [END],
    "usage": [chunked(part) for part in (*ANSWER, event(USAGE), DONE)] + [END],
    "two events in a packet": [chunked(FIRST[0]), chunked(*FIRST[1:]), chunked(ANSWER[-1], DONE), END],
    "a line in two packets": [*(chunked(part[:9]) + chunked(part[9:]) for part in (*ANSWER, DONE)), END],
}


@pytest.mark.parametrize("takes", [True, False], ids=["short cut", "queue"])
@pytest.mark.parametrize("packets", ODD.values(), ids=ODD)
async def test_an_answer_may_be_cut_anywhere(packets: Sequence[bytes], takes: bool) -> None:
    await tokens(packets, takes=takes)


@pytest.mark.parametrize("takes", [True, False], ids=["short cut", "queue"])
@pytest.mark.parametrize("end", [b"", event(LAST)[:30], event(LAST)[:-2], b"data: [DONE"], ids=repr)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "aborted"])
async def test_a_server_that_closes_in_mid_stream_is_lost(end: bytes, whole: bool, takes: bool) -> None:
    packets = [chunked(*FIRST), chunked(end) if end else b"", END if whole else b""]
    with pytest.raises(EngineLostError):
        await tokens(packets, closes=True, takes=takes)


async def test_an_error_event_is_reported() -> None:
    with pytest.raises(HandoffError, match="no luck"):
        await tokens([chunked(FIRST[0]), chunked(event({"error": {"message": "no luck"}})), END])


async def test_a_connection_is_used_again_though_its_response_ends_in_another_packet() -> None:
    assert await tokens([chunked(*ANSWER), chunked(DONE), END], times=3) == 1


async def test_a_response_that_does_not_end_costs_no_answer() -> None:
    assert await tokens([chunked(*ANSWER), chunked(DONE)], times=2) == 2
    assert await tokens([chunked(*ANSWER), chunked(DONE), b"no chunk"], times=2) == 2
    assert await tokens([chunked(*ANSWER), chunked(DONE), chunked(*FIRST)], times=2) == 2


async def test_sglangs_connections_are_used_again() -> None:
    ended = {"output_ids": TOKENS, "meta_info": {"completion_tokens": 4, "finish_reason": {"type": "length"}}}
    answering = server([chunked(event(ended)), chunked(DONE), END], False)
    async with answering as (url, connections), new_session() as session:
        client = SglangClient(session, url, RouterTimers(), "decode")
        for _ in range(3):
            assert await read(client.leg(REQUEST, {}), False) == TOKENS
    assert len(connections) == 1

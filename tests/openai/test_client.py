"""The client of OpenAI servers: streams, their ends, and refusals."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from baton.bench.timed_stream import stream_completion
from baton.errors import EngineLostError, EngineUnavailableError, HandoffError, OverloadedError, ProtocolError
from baton.openai.client import KEEP_ALIVE_S, OpenAIClient, connected_client
from baton.router.clients.engine_client import new_session
from testkit.servers.fake_serving import served

DONE = b"data: [DONE]\n\n"


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@asynccontextmanager
async def saying(*parts: bytes, status: int = 200) -> AsyncIterator[OpenAIClient]:
    """A client of a server that answers every completion with these parts."""

    async def complete(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"]
        return web.Response(body=b"".join(parts), status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with served(app) as url, connected_client(url, 10.0) as client:
        yield client


async def test_events_come_until_the_stream_is_complete() -> None:
    parts = event(text="a", token_ids=[1]), b": comment\n\n", event(text="b", token_ids=[2, 3]), DONE, event(text="c")
    async with saying(*parts) as client:
        found = [choice.token_ids async for answer in client.stream({}) for choice in answer.choices]
    assert found == [[1], [2, 3]]


async def test_each_token_of_a_stream_has_its_time() -> None:
    last = event(
        text="b", token_ids=[2, 3], finish_reason="stop", spec_decode={"accepted": [1], "num_speculative_tokens": 3}
    )
    first = event(text="a", token_ids=[1], logprobs={"token_logprobs": [-0.5]})
    async with saying(first, last, DONE) as client:
        answer = await stream_completion(client._session, client.url, {"prompt": "x"})
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("ab", [1, 2, 3], "stop")
    assert (answer.logprobs, answer.accepted) == ([-0.5], [1])
    assert len(answer.times_s) == 3
    assert answer.ttft_s == answer.times_s[0] <= answer.times_s[1] == answer.times_s[2]


async def test_a_stream_without_tokens_has_no_times() -> None:
    async with saying(DONE) as client:
        answer = await stream_completion(client._session, client.url, {"prompt": "x"})
    assert math.isnan(answer.ttft_s)
    assert math.isnan(answer.tokens_per_s)


@pytest.mark.parametrize(
    ("parts", "status", "error", "message"),
    [
        ((event(text="a"),), 200, EngineLostError, "went away in mid-stream"),
        ((event(text="a"), b'data: {"error": {"message": "no memory"}}\n\n'), 200, HandoffError, "no memory"),
        ((b"data: {\n\n",), 200, ProtocolError, "malformed"),
        ((event(token_ids=[-1]), DONE), 200, ProtocolError, "malformed"),
        ((b'{"error": {"message": "later"}}',), 429, OverloadedError, "HTTP 429: later"),
        ((b"no \x1b[31mpaper",), 503, EngineUnavailableError, r"HTTP 503: no  \[31mpaper"),
        ((b"<!DOCTYPE HTML>\n<html>", b"</html>"), 404, EngineUnavailableError, r"HTTP 404: a page of HTML$"),
    ],
)
async def test_errors_of_a_server_become_batons_errors(
    parts: tuple[bytes, ...], status: int, error: type[Exception], message: str
) -> None:
    async with saying(*parts, status=status) as client:
        with pytest.raises(error, match=message) as raised:
            async for _ in client.stream({}):
                pass
    assert raised.type is error


async def test_a_server_that_is_not_there_is_lost() -> None:
    async with connected_client("http://127.0.0.1:1", 10.0) as client:
        with pytest.raises(EngineLostError):
            await client.model()


async def test_a_connection_that_was_idle_is_not_used_again() -> None:
    """A server may close it just as the next request is written, as vLLM does after 5 s."""
    assert KEEP_ALIVE_S < 5
    body = b'{"choices": [{"text": "a"}]}'

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with connected_client(url) as client, new_session() as session:
            for wait in (KEEP_ALIVE_S + 0.1, 0.0):
                assert (await client.complete({})).choices
                async with session.post(url, json={}) as response:
                    assert await response.read() == body
                await asyncio.sleep(wait)

"""The client of one engine, against servers that send too much, too little, or something else."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from baton.errors import EngineUnavailableError, ProtocolError, RequestError
from baton.router.clients.engine_client import BatonClient, new_session
from baton.router.timers import RouterTimers
from baton.sampling_params import MAX_TOKEN_ID, SamplingParams
from baton.wire import GenerateRequest, TokenChunk, TokenLogprobs
from testkit.servers.fake_serving import FakeEngine, load_of, served

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())


@contextlib.asynccontextmanager
async def engine(parts: Sequence[bytes], status: int = 200) -> AsyncIterator[BatonClient]:
    """A client of a server that answers everything with `parts`, one after the other."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.02)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url, new_session() as session:
        yield BatonClient(session, url, RouterTimers())


async def chunks(client: BatonClient, request: GenerateRequest = REQUEST) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(request)]


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"<html>",
        b'{"engine_id": "\xff"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b" " * (2**20 + 1),
    ],
    ids=["nothing", "no JSON", "no text", "deep", "too long"],
)
async def test_a_server_that_is_no_engine(body: bytes) -> None:
    async with engine([body]) as client:
        with pytest.raises(ProtocolError):
            await client.info()


@pytest.mark.parametrize("value", [-1, 2**53])
@pytest.mark.parametrize("field", ["num_running", "num_waiting", "kv_usage", "num_cached_pages"])
async def test_a_load_that_cannot_be(field: str, value: int) -> None:
    told = msgspec.structs.asdict(load_of(1))
    async with engine([msgspec.json.encode(told)]) as client:
        assert await client.load() == load_of(1)
    async with engine([msgspec.json.encode({**told, field: value})]) as client:
        with pytest.raises(ProtocolError, match=rf"\$\.{field}"):
            await client.load()


@pytest.mark.parametrize(
    "line",
    [
        b'{"request_id": "r", "token_ids": [-1], "position": 0}',
        b'{"request_id": "r", "token_ids": [2147483648], "position": 0}',
        b'{"request_id": "\xff"}',
        b'{"request_id": "r", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"7" * 2**22,
        b'{"request_id": "r", "token_ids": [1], "position": 0, "accepted": [1000000000000], "drafted": [3]}',
        b'{"request_id": "r", "token_ids": [1], "position": 0, "num_cached_tokens": -1}',
        b'{"request_id": "r", "token_ids": [1], "position": 0, "logprobs": [{"logprob": -1.0, "top": [[-1, -1.0]]}]}',
    ],
    ids=["negative token", "huge token", "no text", "deep", "too long", "endless drafts", "negative count", "no token"],
)
async def test_malformed_chunks(line: bytes) -> None:
    async with engine([line + b"\n"]) as client:
        with pytest.raises(ProtocolError):
            await chunks(client)


async def test_scores_of_a_long_prompt_come_in_one_chunk() -> None:
    score = TokenLogprobs(-1.2345678901234567e-100, [(MAX_TOKEN_ID, -1.2345678901234567e-100)] * 20, MAX_TOKEN_ID)
    told = TokenChunk(request_id="r", finish_reason="length", prompt_logprobs=[None, *[score] * 7999])
    line = msgspec.json.encode(told) + b"\n"
    assert len(line) > 2**22
    params = SamplingParams(max_tokens=0, prompt_logprobs=20)
    asked = msgspec.structs.replace(REQUEST, prompt_token_ids=[1] * 8000, sampling_params=params)
    async with engine([line]) as client:
        assert await chunks(client, asked) == [told]
        with pytest.raises(ProtocolError):
            await chunks(client)


async def test_bytes_after_the_end_of_a_stream_are_bounded() -> None:
    last = b'{"request_id": "r", "finish_reason": "stop"}\n'
    async with engine([last, b"\n"]) as client:
        assert [chunk.finish_reason for chunk in await chunks(client)] == ["stop"]
    async with engine([last, *[b" " * 2**18] * 8]) as client:
        with pytest.raises(ProtocolError, match="larger than"):
            await chunks(client)


async def test_compressed_answers_are_asked_for_by_nobody_and_not_decompressed() -> None:
    """The received bytes bound an engine's answer, whatever encoding it claims."""
    asked: list[str | None] = []
    body = gzip.compress(b" " * 2**22 + b"{}")

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Accept-Encoding"))
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url, new_session() as session:
        client = BatonClient(session, url, RouterTimers())
        for call in (client.info(), client.metrics_text(), chunks(client)):
            with pytest.raises(
                (ProtocolError, EngineUnavailableError), match=r"malformed|not a Baton engine|no text|mid-stream"
            ):
                await call
    assert asked == ["identity"] * 3


async def test_an_answer_that_came_while_this_process_was_paused_is_no_silence(directory: Path) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) == 1:
            time.sleep(1.5)  # no loop runs: as if this process had been stopped
            await asyncio.sleep(0.05)
        return web.Response(body=msgspec.json.encode(FakeEngine(directory).info))

    app = web.Application()
    app.router.add_get("/inference/v1/info", answer)
    async with served(app) as url, new_session() as session:
        client = BatonClient(session, url, RouterTimers(answer=1.0))
        assert (await client.info()).engine_id == FakeEngine(directory).info.engine_id
    assert len(asked) == 2


async def test_a_refusal_keeps_its_message_in_however_many_pieces() -> None:
    body = b'{"error": {"message": "no such thing", "param": "seed"}}'
    async with engine([body[:20], body[20:]], status=400) as client:
        with pytest.raises(RequestError, match="no such thing") as refused:
            await chunks(client)
        assert refused.value.param == "seed"
    async with engine([b'{"error": {"message": "\xff"}}'], status=409) as client:
        with pytest.raises(EngineUnavailableError, match="HTTP 409"):
            await chunks(client)

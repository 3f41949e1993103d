"""Errors as clients see them: in OpenAI's format, and without addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from aiohttp import web

from baton.errors import (
    EngineUnavailableError,
    HandoffError,
    OverloadedError,
    ProtocolError,
    RequestError,
    refusal_text,
)
from baton.openai.http.api_errors import error_of_chunk, to_api_error
from baton.openai.http.app import new_app, send_answer
from baton.openai.http.metrics import FrontMetrics
from baton.openai.http.serving import bind
from baton.openai.http.serving import served as serving


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("engine http://10.1.2.3:8100: HTTP 503", "engine (address): HTTP 503"),
        ("no engine; http://p-0.internal:81/x: gone; tcp://[::1]:5 too", "no engine; (address): gone; (address) too"),
        (
            "Cannot connect to host p-0.internal:8100 ssl:default [Connect call failed ('10.1.2.3', 8100)]",
            "Cannot connect to host (address) ssl:default [Connect call failed (address)]",
        ),
        ("Connect call failed ('::1', 8100, 0, 0)", "Connect call failed (address)"),
        ("peer 10.1.2.3 and [fe80::1]:80", "peer (address) and (address)"),
        ("lease_expired: engine p-0 was silent for 5.0 s", "lease_expired: engine p-0 was silent for 5.0 s"),
        ("model.weights: here '3:ab', peer [1, 2]", "model.weights: here '3:ab', peer [1, 2]"),
    ],
)
def test_addresses_stay_in_the_log(text: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    for error in (EngineUnavailableError(text), ProtocolError(text), OverloadedError(text)):
        assert to_api_error(error).message == shown
    assert to_api_error(HandoffError("lost", text)).message == f"lost: {shown}"
    assert (text in caplog.text) == (text != shown)
    assert to_api_error(RequestError(text)).message == text, "it is the client's own"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("unit", ["a", "a.", "[:", ":", "('a', 1", "::", "a-1."])
def test_long_messages_of_engines_are_looked_through_at_once(unit: str) -> None:
    """A quadratic pattern took seconds for a message that an engine may send; this is sixteen times as long."""
    text = unit * (2**20 // len(unit))
    assert len(to_api_error(EngineUnavailableError(f"http://10.1.2.3:8100 {text}")).message) > 2000


def test_a_body_that_nests_too_deeply_for_whoever_handles_it() -> None:
    told = to_api_error(RecursionError("maximum recursion depth exceeded"))
    assert (told.status, told.type) == (400, "invalid_request_error")
    assert "nests too deeply" in told.message


@pytest.mark.parametrize("error", [RequestError("no: token", "bad_words"), RequestError("no token")])
def test_a_refusal_crosses_http(error: RequestError) -> None:
    told = to_api_error(error_of_chunk(refusal_text(error)))
    assert (told.status, told.param, told.message) == (400, error.param, str(error))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_answer_that_fails_on_the_way_is_cut_and_followed_by_no_other(version: str) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: one\n\n"
        raise RuntimeError("a fault of this server")

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_answer(request, events())

    metrics = FrontMetrics()
    app = new_app(metrics)
    app.router.add_get("/x", answer)
    listener = bind("127.0.0.1", 0)
    async with serving(app, listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /x HTTP/%b\r\nHost: a\r\n\r\n" % version.encode())
        told = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert told.count(b"HTTP/1.") == 1
    assert told.rstrip().endswith(b"data: one")
    assert metrics.requests == {("/x", 500): 1}

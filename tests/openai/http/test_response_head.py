"""A refusal sets the status although a stream's head is made."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.http import StreamWriter

from baton.errors import EngineUnavailableError, OverloadedError
from baton.openai import FrontMetrics
from baton.openai.http.app import ResponseHead, new_app, send_answer
from baton.openai.streams import LastEvents
from testkit.servers.fake_serving import served, until

ERRORS = {503: EngineUnavailableError("no engine"), 429: OverloadedError("full")}


async def _events() -> AsyncGenerator[bytes, None]:
    yield b"data: a\n\n"
    yield LastEvents(b"data: [DONE]\n\n")


def _app() -> web.Application:
    """`waits` for the head. `status`: refuses."""

    async def answer(request: web.Request) -> web.StreamResponse:
        with ResponseHead(request) as head:
            if "waits" in request.query:
                writer = request.writer
                assert isinstance(writer, StreamWriter)
                await until(lambda: writer.chunked)
            if "status" in request.query:
                raise ERRORS[int(request.query["status"])]
            return await send_answer(request, _events(), head=head)

    app = new_app(FrontMetrics())
    app.router.add_get("/", answer)
    return app


@pytest.mark.parametrize("waits", ["", "waits=1"])
@pytest.mark.parametrize("status", [200, 429, 503])
async def test_a_refusal_sets_the_status_although_the_head_is_made(
    waits: str, status: int, session: aiohttp.ClientSession
) -> None:
    wanted = f"?{waits}" + ("" if status == 200 else f"&status={status}")
    async with served(_app()) as url:
        for _ in range(2):
            async with session.get(f"{url}/{wanted}", headers={"X-Request-Id": "mine"}) as answer:
                body = await answer.read()
                assert (answer.status, answer.headers["X-Request-Id"]) == (status, "mine")
                assert ("Transfer-Encoding" in answer.headers) == (status == 200)
            if status == 200:
                assert body == b"data: a\n\ndata: [DONE]\n\n"
                assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            else:
                assert int(answer.headers["Content-Length"]) == len(body)
                assert json.loads(body)["error"]["message"] == str(ERRORS[status])

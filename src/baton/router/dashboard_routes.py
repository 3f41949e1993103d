"""The router's routes for its dashboard: the page, its events, and one request by id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from baton import __version__
from baton.errors import BatonError
from baton.observe.dashboard import dashboard_page
from baton.openai.http.app import DRAIN, json_response
from baton.openai.http.connections import Stream
from baton.router.router_backend import RouterBackend
from baton.router.status.deployment_status import Status

_BUSY_S, _IDLE_S, _POLL_S = 1.0, 3.0, 0.25
_MAX_PAGES = 32


def add_dashboard(
    app: web.Application,
    backend: RouterBackend,
    status: Callable[[], Awaitable[Status]],
    admin_enabled: bool,
) -> None:
    """Add `/dashboard`. `status` returns `/status`, shared by all open pages."""
    num_open, recent = 0, backend.observer.recent

    async def snapshot() -> bytes:
        state = await status()
        content = {
            **state,
            **recent.describe(time.monotonic()),
            "engines": [_without_facts(engine) for engine in state["engines"]],
            "model": _model(backend),
            "version": __version__,
            "admin": admin_enabled,
        }
        return msgspec.json.encode(content)

    async def events(request: web.Request) -> web.StreamResponse:
        """The dashboard's content, as server-sent events."""
        nonlocal num_open
        if num_open >= _MAX_PAGES:
            raise web.HTTPServiceUnavailable(reason="too many dashboards are open")
        num_open += 1
        try:
            response = Stream(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            while not app[DRAIN].begun:
                num_seen = recent.num_begun
                await response.send(request, b"data: " + await snapshot() + b"\n\n")
                waited = 0.0
                while waited < _IDLE_S and not app[DRAIN].begun:
                    await asyncio.sleep(_POLL_S)
                    waited += _POLL_S
                    busy = recent.num_running or recent.num_begun != num_seen
                    if busy and waited >= _BUSY_S:
                        break
            await response.write_eof()
            return response
        finally:
            num_open -= 1

    async def one_request(request: web.Request) -> web.StreamResponse:
        """The timeline of a recent request, by its id or `X-Request-Id`."""
        now = time.monotonic()
        timelines = recent.find(request.match_info["id"])
        if not timelines:
            raise web.HTTPNotFound(reason="no recent request has this id")
        return json_response({"choices": [one.describe(now) for one in timelines]})

    app.router.add_get("/dashboard", _page)
    app.router.add_get("/dashboard/events", events, allow_head=False)
    app.router.add_get("/dashboard/requests/{id}", one_request)


async def _page(request: web.Request) -> web.StreamResponse:
    """The dashboard."""
    page = dashboard_page()
    headers = {"Content-Security-Policy": page.policy, "Cache-Control": "no-cache"}
    return web.Response(text=page.html, content_type="text/html", headers=headers)


def _without_facts(engine: Status) -> Status:
    """Without the engine's facts, which are kilobytes."""
    info = engine["info"]
    return {**engine, "info": None if info is None else {"engine_id": info.engine_id}}


def _model(backend: RouterBackend) -> str | None:
    try:
        return backend.model().name
    except BatonError:
        return None

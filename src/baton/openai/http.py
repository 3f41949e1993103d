"""The OpenAI API over HTTP: aiohttp routes, server-sent events, and how a Baton process listens and ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton.errors import ConfigError
from baton.openai.errors import ApiError, to_api_error
from baton.openai.metrics import FrontMetrics
from baton.openai.service import EventStream, OpenAIService

MAX_BODY_BYTES = 16 * 2**20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def new_app(metrics: FrontMetrics) -> web.Application:
    """Return an app that answers every error in OpenAI's shape and serves `GET /metrics`."""

    @web.middleware
    async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "unknown"
        status = 499  # a client that went away gets no answer; this is how it is counted
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            return error_response(ApiError(error.status, error.reason, "invalid_request_error"))
        except ConnectionResetError:
            raise
        except Exception as error:
            api_error = to_api_error(error)
            status = api_error.status
            return error_response(api_error)
        finally:
            metrics.request_ended(endpoint, status)

    async def show_metrics(request: web.Request) -> web.StreamResponse:
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[shape_errors], client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/metrics", show_metrics)
    return app


def add_openai_routes(app: web.Application, service: OpenAIService) -> None:
    """Add `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

    async def models(request: web.Request) -> web.StreamResponse:
        return json_response(service.models())

    async def completions(request: web.Request) -> web.StreamResponse:
        return await _reply(request, await service.completions(await request.read()))

    async def chat(request: web.Request) -> web.StreamResponse:
        return await _reply(request, await service.chat(await request.read()))

    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)


def json_response(value: object, status: int = 200) -> web.Response:
    """Return `value` (plain data or msgspec structs) as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    """Return an error in OpenAI's shape."""
    return web.Response(body=error.body(), status=error.status, content_type="application/json")


async def _reply(request: web.Request, reply: bytes | EventStream) -> web.StreamResponse:
    if isinstance(reply, bytes):
        return web.Response(body=reply, content_type="application/json")
    async with contextlib.aclosing(reply.events) as events:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async for event in events:
            await response.write(event)
        await response.write_eof()
    return response


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free one. Raises `ConfigError` when it cannot be had.

    Binding comes before anything slow is loaded, so that a port in use is known at once.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(512)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError("port", f"{port} on {host} is already in use") from None
        raise ConfigError("port", f"cannot listen on {host}:{port}: {error}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base URL at which `listener` is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: web.Application,
    listener: socket.socket,
    on_ready: Callable[[], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serve `app` until SIGINT, SIGTERM or `stop`; requests that still run are then cancelled.

    `handler_cancellation` is what turns a client that goes away into an aborted request.
    """
    ended = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        on_ready()
        await ended.wait()
    finally:
        await runner.cleanup()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

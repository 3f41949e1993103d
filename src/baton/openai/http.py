"""The OpenAI API over HTTP: aiohttp routes, errors in OpenAI's shape, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton import __version__
from baton.errors import DrainingError
from baton.openai.access import OPEN, Access, ApiKeys, name_response
from baton.openai.backend import ServedModel
from baton.openai.connections import Stream
from baton.openai.errors import ApiError, to_api_error
from baton.openai.limits import Bodies, HttpLimits
from baton.openai.metrics import FrontMetrics, exposed
from baton.openai.plan import make_chat_plan, make_completion_plan
from baton.openai.responses import make_response_plan, respond
from baton.openai.service import OpenAIService
from baton.openai.tools import Parsing
from baton.openai.tracing import TRACE, trace_of

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RETRY_AFTER_S = 1


class Drain:
    """The running requests of a server, and how far its shutdown has come."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[object]] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.begun = self.ended = False

    def begin(self) -> None:
        """Take no new requests."""
        self.begun = True

    def end(self) -> None:
        """Cancel running requests; their handlers tell their clients."""
        self.begun = self.ended = True
        for task in self.tasks:
            task.cancel()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the current task as a request. Raises `EngineUnavailableError` when none is taken."""
        if self.begun:
            raise DrainingError("this server is shutting down")
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.idle.clear()
        try:
            yield
        finally:
            self.tasks.discard(task)
            if not self.tasks:
                self.idle.set()


DRAIN: web.AppKey[Drain] = web.AppKey("drain", Drain)
LIMITS: web.AppKey[HttpLimits] = web.AppKey("limits", HttpLimits)
TLS: web.AppKey[ssl.SSLContext] = web.AppKey("tls", ssl.SSLContext)
BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)


def new_app(
    metrics: FrontMetrics,
    limits: HttpLimits | None = None,
    access: Access = OPEN,
    families: Callable[[], Awaitable[Iterable[Metric]]] | None = None,
) -> web.Application:
    """Return an app that answers every error in OpenAI's shape and serves `GET /metrics`.

    `access`: who may use the API, and how. `families`: what `/metrics` shows; None: `metrics`. Raises `ConfigError` for
    an empty key, and for certificates that cannot be used.
    """
    drain, limits, keys = Drain(), limits or HttpLimits(), ApiKeys(access.api_keys)

    @web.middleware
    async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (allowed := access.preflight(request)) is not None:
            return allowed
        TRACE.set(trace_of(request.headers))
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "unknown"
        status = 499  # counted for a client that went away, which gets no answer
        try:
            with contextlib.nullcontext() if endpoint == "/metrics" else drain.running():
                keys.check(request)
                response = await handler(request)
            status = response.status
            return response
        except asyncio.CancelledError:
            if not drain.ended or request.writer.output_size > 0:
                raise
            status = 503
            return error_response(_shutting_down())
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
            metrics.requests.labels(endpoint, str(status)).inc()

    async def show_metrics(request: web.Request) -> web.StreamResponse:
        body = exposed(metrics.registry.collect() if families is None else await families())
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[shape_errors])
    app.on_response_prepare.extend((name_response, access.allow_origin))
    if (context := access.tls()) is not None:
        app[TLS] = context
    app[DRAIN], app[LIMITS], app[BODIES] = drain, limits, Bodies(limits)
    app.router.add_get("/metrics", show_metrics)
    return app


def add_openai_routes(app: web.Application, service: OpenAIService) -> None:
    """Add OpenAI's models, completions, chats and responses, and vLLM's `/tokenize`, `/detokenize` and `/version`."""

    async def models(request: web.Request) -> web.StreamResponse:
        return json_response(service.models())

    async def model(request: web.Request) -> web.StreamResponse:
        return json_response(service.model_card(request.match_info["name"]))

    async def version(request: web.Request) -> web.StreamResponse:
        return json_response({"version": __version__})

    async def tokenize(request: web.Request) -> web.StreamResponse:
        async with app[BODIES].read(request) as body:
            return json_response(await service.tokenize(body))

    async def detokenize(request: web.Request) -> web.StreamResponse:
        async with app[BODIES].read(request) as body:
            return json_response(await service.detokenize(body))

    async def completions(request: web.Request) -> web.StreamResponse:
        return await _reply(request, await service.answer(await plan(request, make_completion_plan)))

    async def chat(request: web.Request) -> web.StreamResponse:
        return await _reply(request, await service.answer(await plan(request, make_chat_plan)))

    async def responses(request: web.Request) -> web.StreamResponse:
        return await _reply(request, await respond(service, await plan(request, make_response_plan)))

    async def no_response(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound(reason="responses are not kept here: there is none to get, cancel or delete")

    async def plan(request: web.Request, make: Callable[[bytes, ServedModel, Parsing], T]) -> T:
        async with app[BODIES].read(request) as body:
            return await service.plan(body, make)

    app.router.add_get("/version", version)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)  # names of the hub have slashes
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/responses", responses)
    app.router.add_route("*", "/v1/responses/{id:.+}", no_response)


def json_response(value: object, status: int = 200) -> web.Response:
    """Return `value` (plain data or msgspec structs) as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    """Return an error in OpenAI's shape."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.status == 429 else None
    return web.Response(body=error.body(), status=error.status, content_type="application/json", headers=headers)


async def _reply(request: web.Request, reply: bytes | AsyncGenerator[bytes, None]) -> web.StreamResponse:
    if isinstance(reply, bytes):
        return web.Response(body=reply, content_type="application/json")
    async with contextlib.aclosing(reply) as events:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = Stream(headers=headers)
        await response.prepare(request)
        try:
            async for event in events:
                await response.send(request, event)
        except asyncio.CancelledError:
            if not request.app[DRAIN].ended:
                raise
            await response.send(request, b"data: " + _shutting_down().body() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
    return response


def _shutting_down() -> ApiError:
    return to_api_error(DrainingError("this server is shutting down"))

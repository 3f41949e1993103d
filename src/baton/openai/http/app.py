"""The aiohttp app of every server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton.error_help import CODE_BY_STATUS
from baton.errors import DrainingError
from baton.openai.http.access import OPEN, Access, ApiKeys, name_response
from baton.openai.http.api_errors import ApiError, to_api_error
from baton.openai.http.caller import CALLER, Caller, note_standing, request_id_of, session_in
from baton.openai.http.connections import ClientConnection, Stream
from baton.openai.http.limits import Bodies, HttpLimits
from baton.openai.http.metrics import FrontMetrics, RowCollector, exposition_text, gauge
from baton.openai.http.tracing import TRACE, trace_of
from baton.openai.messages import error_body
from baton.openai.records import log_refusal
from baton.openai.streams import LastEvents, StartedStream

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RETRY_AFTER_S = 1
_CONTINUE_BYTES = len(b"HTTP/1.1 100 Continue\r\n\r\n")  # no answer
# A shutdown does not wait for these.
_UNCOUNTED = ("/metrics", "/dashboard/events")
MESSAGES = "/v1/messages"


class Drain:
    """Running requests, and the state of the shutdown."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[object]] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.begun = self.ended = False

    def begin(self) -> None:
        self.begun = True

    def end(self) -> None:
        """Cancelled handlers still send their clients an error."""
        self.begun = self.ended = True
        for task in self.tasks:
            task.cancel()

    def enter(self) -> asyncio.Task[object]:
        """Count the current task as a request until `leave`. Raises `DrainingError` after `begin`."""
        if self.begun:
            raise DrainingError("this server is shutting down")
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.idle.clear()
        return task

    def leave(self, task: asyncio.Task[object]) -> None:
        self.tasks.discard(task)
        if not self.tasks:
            self.idle.set()


DRAIN: web.AppKey[Drain] = web.AppKey("drain", Drain)
LIMITS: web.AppKey[HttpLimits] = web.AppKey("limits", HttpLimits)
TLS: web.AppKey[ssl.SSLContext] = web.AppKey("tls", ssl.SSLContext)
BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)
KEYS: web.AppKey[ApiKeys] = web.AppKey("keys", ApiKeys)


def new_app(
    metrics: FrontMetrics,
    limits: HttpLimits | None = None,
    access: Access = OPEN,
    families: Callable[[], Awaitable[Iterable[Metric]]] | None = None,
) -> web.Application:
    """`families`: the content of `/metrics`; None: `metrics`. Raises `ConfigError`."""
    drain, limits, keys = Drain(), limits or HttpLimits(), ApiKeys(access.api_keys)

    @web.middleware
    async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Per request, since one task serves all requests of a connection.
        session = session_in(request.headers)
        caller = Caller(request_id_of(request.headers), request.remote, keys.number(request), session=session)
        CALLER.set(caller)
        TRACE.set(trace_of(request.headers))
        if (allowed := access.preflight(request)) is not None:
            return allowed
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "unknown"
        status = 499  # the client left before a response

        def refuse(error: ApiError) -> web.Response:
            nonlocal status
            status = error.status
            log_refusal(request.method, request.path if resource is None else endpoint, error)
            return _error_reply(request, error)

        counted = None
        try:
            counted = None if endpoint in _UNCOUNTED else drain.enter()
            keys.check(request)
            access.check_page(request)
            note_standing(caller, request.headers)
            response = await handler(request)
            status = response.status
            return response
        except asyncio.CancelledError:
            if not drain.ended or request.writer.output_size > 0:
                raise
            return refuse(_shutting_down())
        except web.HTTPException as error:
            return _allowing(error, refuse(_refusal_of_http(error)))
        except ConnectionResetError:
            raise
        except Exception as error:
            return refuse(to_api_error(error))
        finally:
            if counted is not None:
                drain.leave(counted)
            metrics.requests[endpoint, status] += 1

    app = web.Application(middlewares=[shape_errors])
    app.on_response_prepare.append(_preparing(access))
    if (context := access.tls()) is not None:
        app[TLS] = context
    app[DRAIN], app[LIMITS], app[BODIES], app[KEYS] = drain, limits, Bodies(limits), keys
    _add_metrics(app, metrics, families)
    return app


def _add_metrics(
    app: web.Application, metrics: FrontMetrics, families: Callable[[], Awaitable[Iterable[Metric]]] | None
) -> None:
    async def show_metrics(request: web.Request) -> web.StreamResponse:
        """Metrics for Prometheus."""
        body = exposition_text(metrics.registry.collect() if families is None else await families())
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    text, drain = "Whether the server ends, and takes no new requests.", app[DRAIN]
    metrics.registry.register(RowCollector(lambda: [gauge("draining", text, drain.begun)]))
    app.router.add_get("/metrics", show_metrics)


def beside(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[web.Application], AsyncGenerator[None, None]]:
    """A cleanup context: `work` runs while an app does."""

    async def context(app: web.Application) -> AsyncGenerator[None, None]:
        task = asyncio.create_task(work())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    return context


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: ApiError, body: bytes | None = None) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s or _RETRY_AFTER_S)} if error.status == 429 else None
    return web.Response(
        body=body or error.body(), status=error.status, content_type="application/json", headers=headers
    )


async def send_answer(
    request: web.Request,
    answer: bytes | AsyncGenerator[bytes, None],
    ended: Callable[[ApiError], bytes] = lambda error: b"data: " + error.body() + b"\n\ndata: [DONE]\n\n",
) -> web.StreamResponse:
    """`ended`: the last events of the stream if a shutdown ends it."""
    if isinstance(answer, bytes):
        return web.Response(body=answer, content_type="application/json")
    async with contextlib.aclosing(answer) as events:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = Stream(headers=headers)
        await response.prepare(request)
        short_cut = answer.short_cut if isinstance(answer, StartedStream) else None
        ends = False
        try:
            async for event in events:
                ends = isinstance(event, LastEvents)
                await response.send(request, event, ends)
                if short_cut is not None:
                    short_cut.write = response.send_more
        except asyncio.CancelledError:
            if ends or not request.app[DRAIN].ended:
                raise
            await response.send(request, ended(_shutting_down()))
        await response.write_eof()
    return response


def _error_reply(request: web.Request, error: ApiError) -> web.Response:
    """Drops the rest of an unread body. Raises `ConnectionResetError` if another answer has begun."""
    if request.writer.output_size > _CONTINUE_BYTES:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer had begun")
    response = error_response(error, error_body(error) if request.path.startswith(MESSAGES) else None)
    if not request.content.is_eof() and isinstance(request.protocol, ClientConnection):
        response.force_close()
        request.protocol.discard()
    return response


def _refusal_of_http(error: web.HTTPException) -> ApiError:
    return ApiError(error.status, error.reason, "invalid_request_error", None, CODE_BY_STATUS.get(error.status))


def _allowing(error: web.HTTPException, reply: web.Response) -> web.Response:
    if (methods := error.headers.get("Allow")) is not None:
        reply.headers["Allow"] = methods
    return reply


def _preparing(access: Access) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        name_response(request, response)
        access.allow_origin(request, response)
        _shape_expectation(response)
        if request.version < HttpVersion11 and response.content_length is None:
            response.force_close()  # ends the stream

    return prepare


def _shape_expectation(response: web.StreamResponse) -> None:
    """aiohttp refuses an `Expect` that it does not know before any middleware runs."""
    if isinstance(response, web.HTTPExpectationFailed):
        status = response.status
        reason = "Expect: only 100-continue is known"
        error = ApiError(status, reason, "invalid_request_error", None, CODE_BY_STATUS[status])
        response.body, response.content_type = error.body(), "application/json"
        response.headers["Content-Length"] = str(len(error.body()))


def _shutting_down() -> ApiError:
    return to_api_error(DrainingError("this server is shutting down"))

"""Client connections: a time limit for request heads, and OpenAI's error shape for malformed HTTP."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton.openai.errors import ApiError

logger = logging.getLogger(__name__)

_BODY_TYPE = "application/json"


class ClientConnection(web.RequestHandler):
    """One client's connection. A request whose head is not there `head_s` seconds after its first byte (the first one:
    after the connection) is answered with 408, and the connection closed.

    aiohttp itself limits only idle connections, and answers malformed HTTP with text and a traceback.
    """

    __slots__ = ("_head_s", "_head_timer")

    def __init__(self, server: web.Server, head_s: float, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._idle():
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that no handler could: one that is not HTTP, or that failed outside the app."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if isinstance(exc, HttpProcessingError):
            # The first line says what, the next ones show the client's bytes.
            what = (exc.message.splitlines() or ["malformed"])[0].rstrip(": ")
            logger.warning("malformed HTTP from %s: %s", request.remote, what)
            error = ApiError(status, f"malformed HTTP: {what}", "invalid_request_error")
        else:
            logger.error("a request could not be answered", exc_info=exc)
            error = ApiError(status, "internal error", "server_error", None, "internal_error")
        response = web.Response(status=status, body=error.body(), content_type=_BODY_TYPE)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log what failed outside the app, but for a body that cannot be decoded: aiohttp reads on in it after it was
        refused."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

    def _idle(self) -> bool:
        """Whether it waits for a request, or for the rest of one's head."""
        return self._waiter is not None and not self._waiter.done()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._idle() or self.transport is None:
            return
        body = ApiError(408, "the request did not come in time", "invalid_request_error").body()
        head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: {_BODY_TYPE}\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.force_close()

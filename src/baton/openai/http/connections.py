"""Client connections: their time limits, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from baton.log_limit import LogLimit
from baton.openai.http.api_errors import ApiError
from baton.openai.http.limits import HttpLimits

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())  # any client may cause these lines

LINGER_S = 2.0
_BODY_TYPE = "application/json"


class WriteBacklog:
    """Response bytes that clients have not read."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limit = limits.unread_bytes
        self._waiting: dict[ClientConnection, int] = {}
        self.num_bytes = 0

    def waits(self, connection: ClientConnection, size: int) -> None:
        """Record that `size` bytes wait. If all together exceed the limit, cut off the client with the most."""
        self.num_bytes += size - self._waiting.get(connection, 0)
        self._waiting[connection] = size
        if self.num_bytes > self._limit:
            # Clients may have read since their last record.
            self._waiting = {one: one.num_unread() for one in self._waiting}
            self.num_bytes = sum(self._waiting.values())
            if self.num_bytes > self._limit:
                max(self._waiting, key=self._waiting.__getitem__).cut_off()

    def has_read(self, connection: ClientConnection) -> None:
        self.num_bytes -= self._waiting.pop(connection, 0)


class Sending(Protocol):
    """asyncio's transport, below TLS if any."""

    def get_write_buffer_size(self) -> int: ...
    def abort(self) -> None: ...


class ClientConnection(web.RequestHandler):
    """A request whose head is not complete `HttpLimits.head_s` after its first byte (the first request: after the
    connection) gets status 408. aiohttp only limits idle connections, and answers malformed HTTP with a traceback.

    `send` never waits for the client, so no engine does: unread bytes are buffered, up to the limits of docs/api.md
    ("Bounds", "Connections").
    """

    __slots__ = (
        *("_added", "_discards", "_head_timer", "_limits", "_open", "_sending", "_unread", "_write_timer"),
        *("has_asked", "is_made", "tls"),
    )

    def __init__(self, server: web.Server, limits: HttpLimits, unread: WriteBacklog, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._limits, self._unread = limits, unread
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self.tls: Sending | None = None  # set before the connection is made
        # aiohttp drops its own reference before all is sent.
        self._open: asyncio.Transport | None = None
        self._sending: Sending | None = None
        self._added = 0
        self.is_made = False
        self.has_asked = False  # a complete head was received
        self._discards = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.is_made = True
        self._open = cast(asyncio.Transport, transport)
        # Pauses and resumes show whether anything is buffered. A high limit of 0 would make TLS pause needlessly.
        self._open.set_write_buffer_limits(high=1, low=0)
        self._sending = self.tls or self._open
        self._head_timer = self._loop.call_later(self._limits.head_s, self._head_is_late)

    async def send(self, writer: StreamWriter, data: bytes, ends: bool = False) -> None:
        """Does not wait, unless the response `ends`. Raises `ConnectionResetError`."""
        before = self._check_unread()
        await (writer.write_eof(data) if ends else writer.write(data, drain=False))
        self._note_sent(before)

    def send_raw(self, data: bytes) -> None:
        transport = self._open
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        if self._write_timer is None and self.tls is None:  # nothing is unread
            transport.write(data)
            return
        before = self._check_unread()
        transport.write(data)
        self._note_sent(before)

    def _check_unread(self) -> int:
        if self._write_timer is None and self.tls is None:
            return 0  # the transport has not paused
        before = self.num_unread()
        if before > self._limits.stream_bytes:
            self.cut_off()
            raise ConnectionResetError("the client does not read its answer")
        return before

    def _note_sent(self, before: int) -> None:
        if before:
            after = self.num_unread()
            self._added += after - before
            self._unread.waits(self, after)

    def num_unread(self) -> int:
        return 0 if self._sending is None else self._sending.get_write_buffer_size()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._added = 0
        self._write_timer = self._loop.call_later(self._limits.write_s, self._check_progress)
        self._unread.waits(self, self.num_unread())

    def resume_writing(self) -> None:
        self._nothing_waits()
        super().resume_writing()

    def cut_off(self) -> None:
        if self._sending is not None:
            logger.warning("a client is cut off that has not read %d bytes of its answer", self.num_unread())
            self._sending.abort()
            self._sending = None

    def _check_progress(self) -> None:
        if self.num_unread() > self._added:
            self.cut_off()
        else:
            self._added = 0
            self._write_timer = self._loop.call_later(self._limits.write_s, self._check_progress)

    def _nothing_waits(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._unread.has_read(self)

    def discard(self) -> None:
        """Later data is dropped unparsed: the connection ends after this response."""
        self._discards = True

    def is_reading_paused(self) -> bool:
        return self._reading_paused or getattr(self, "_buffer_paused", False)  # since aiohttp 3.14

    def resume_reading(self, *args: Any, **options: Any) -> None:
        """aiohttp's also parses again."""
        if self.is_reading_paused():
            super().resume_reading(*args, **options)

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        super().data_received(data)
        if not self.is_idle():
            self.has_asked = True
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.head_s, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._nothing_waits()
        self._sending = self._open = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that is not HTTP, or that failed outside the app."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if isinstance(exc, HttpProcessingError):
            # Other lines quote the client's bytes.
            what = (exc.message.splitlines() or ["malformed"])[0].rstrip(": ")
            logger.warning("malformed HTTP from %s: %s", request.remote, what)
            error = ApiError(status, f"malformed HTTP: {what}", "invalid_request_error", None, "malformed_http")
        else:
            logger.error("a request could not be answered", exc_info=exc)
            error = ApiError(status, "internal error", "server_error", None, "internal_error")
        response = _LastResponse(status=status, body=error.body(), content_type=_BODY_TYPE)
        response.force_close()
        response.to = self._open
        self.discard()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Skip a body that cannot be decoded, which aiohttp still reads after its refusal."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

    def is_idle(self) -> bool:
        if self._waiter is None and not self.has_asked:  # aiohttp's task may not have begun
            return not self._messages
        return self._waiter is not None and not self._waiter.done()

    def is_closing(self) -> bool:
        """Closing, except for the client's part of a TLS closure, or closed while aiohttp's task ends."""
        if self._open is None:
            return self.is_made
        return self._open.is_closing() and not self.num_unread()

    def leave(self) -> None:
        """Close without waiting for the client's part of a TLS closure."""
        self.force_close()
        if self._sending is not None and not self.num_unread():
            self._sending.abort()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.is_idle() or self.transport is None:
            return
        body = ApiError(
            408, "the request did not come in time", "invalid_request_error", None, "request_timeout"
        ).body()
        head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: {_BODY_TYPE}\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.force_close()


class _LastResponse(web.Response):
    """Bytes unread at the close would reset the connection."""

    to: asyncio.Transport | None = None

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        if self.to is not None and self.to.can_write_eof():
            self.to.write_eof()
        await asyncio.sleep(LINGER_S)


class Stream(web.StreamResponse):
    """Parts are sent when they are made, not when they are read. The headers share the first part's packet."""

    _send_headers_immediately = False  # an attribute of aiohttp's `Response`; older versions ignore it
    _to: ClientConnection | None = None
    _has_chunks = False

    async def send(self, request: web.Request, data: bytes, ends: bool = False) -> None:
        """Raises the errors of `ClientConnection.send`."""
        if self._to is not None and not ends:
            self.send_more(data)
            return
        if not self.prepared:
            await self.prepare(request)
        writer, connection = request.writer, request.protocol
        assert isinstance(writer, StreamWriter)
        assert isinstance(connection, ClientConnection)
        await connection.send(writer, data, ends)
        self._to, self._has_chunks = connection, writer.chunked

    def send_more(self, data: bytes) -> None:
        """`send`, after the first part."""
        assert self._to is not None
        self._to.send_raw(b"%x\r\n%b\r\n" % (len(data), data) if self._has_chunks else data)

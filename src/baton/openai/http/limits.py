"""Limits on what clients may cost a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from baton.errors import OverloadedError, RequestError
from baton.timeouts import timeout

WRITE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Times are in seconds, sizes in bytes.

    - `head_s`: from the first byte of a request to the end of its head. `body_s`: for its body.
    - `write_s`: for the client to read what is ready of its response.
    - `keep_alive_s`: between two requests; longer than clients keep connections.
    - `bodies_bytes`: all bodies that are being read or decoded.
    - `body_brackets`: brackets in one body, strings included: msgspec holds the GIL while it decodes untyped arrays
      and objects.
    - `stream_bytes`: unread bytes of one stream. `unread_bytes`: of all clients.
    """

    head_s: float = 30.0
    body_s: float = 30.0
    write_s: float = WRITE_TIMEOUT_S
    keep_alive_s: float = 75.0
    body_bytes: int = 16 * 2**20
    bodies_bytes: int = 256 * 2**20
    body_brackets: int = 2**18
    stream_bytes: int = 4 * 2**20
    unread_bytes: int = 256 * 2**20
    connections: int = 16384


class Bodies:
    """Reads request bodies, and counts the bytes in memory."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body counts until the context ends.

        Raises `HTTPRequestTimeout`, `HTTPRequestEntityTooLarge`, `HTTPUnsupportedMediaType` (compressed),
        `RequestError` (it contradicts Transfer-Encoding, or has too many brackets), and `OverloadedError` if all bodies
        exceed `HttpLimits.bodies_bytes`.
        """
        # A compressed body may expand a thousandfold.
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise web.HTTPUnsupportedMediaType(reason="Content-Encoding: request bodies must not be compressed")
        if (request.content_length or 0) > self._limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.body_bytes, request.content_length or 0)
        size = 0
        body = bytearray()

        def add(part: bytes) -> None:
            nonlocal size
            size += len(part)
            self.num_bytes += len(part)
            if size > self._limits.body_bytes:
                raise web.HTTPRequestEntityTooLarge(self._limits.body_bytes, size)
            if self.num_bytes > self._limits.bodies_bytes:
                raise OverloadedError("too many long requests at once")
            body.extend(part)

        try:
            try:
                if request.content.is_eof():  # it came with the head
                    add(request.content.read_nowait())
                else:
                    async with timeout(self._limits.body_s):
                        async for part in request.content.iter_any():
                            add(part)
            except asyncio.TimeoutError:
                raise web.HTTPRequestTimeout from None
            except web.RequestPayloadError:
                raise RequestError("the request body is not what Transfer-Encoding says") from None
            whole = bytes(body)
            body.clear()
            if size > self._limits.body_brackets and whole.count(b"[") + whole.count(b"{") > self._limits.body_brackets:
                raise RequestError(f"the request body has more than {self._limits.body_brackets} arrays and objects")
            yield whole
        finally:
            self.num_bytes -= size

"""Limits on what clients may cost a server."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from aiohttp import web

from baton.errors import OverloadedError, RequestError
from baton.event_loop import timeout

WRITE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """In seconds and bytes.

    - `head_s`: from the first byte of a request to the end of its head. `body_s`: for its body.
    - `write_s`: for the client to read what is ready.
    - `keep_alive_s`: between two requests; longer than clients keep connections.
    - `bodies_bytes`: all bodies that are being read or decoded.
    - `body_brackets`: brackets in one body, and colons, strings included: msgspec holds the GIL while it decodes arrays
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
    """Reads request bodies, counting bytes."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.num_bytes = 0
        self.arriving: set[_Reading] = set()

    def read(self, request: web.Request) -> AbstractAsyncContextManager[bytes]:
        """The body counts until the context ends.

        Raises `HTTPRequestTimeout`, `HTTPRequestEntityTooLarge`, `HTTPUnsupportedMediaType` (compressed),
        `RequestError` (it contradicts Transfer-Encoding, or has too many brackets), and `OverloadedError` if all bodies
        exceed `HttpLimits.bodies_bytes`.
        """
        return _Reading(self, self._limits, request)


class _Reading:
    __slots__ = ("_bodies", "_limits", "_pushed_out", "_request", "_size", "_task")

    def __init__(self, bodies: Bodies, limits: HttpLimits, request: web.Request) -> None:
        self._bodies, self._limits, self._request = bodies, limits, request
        self._size, self._pushed_out = 0, False
        self._task: asyncio.Task[object] | None = None

    async def __aenter__(self) -> bytes:
        try:
            return await self._read()
        except BaseException:
            self._forget()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._forget()

    async def _read(self) -> bytes:
        request, limits = self._request, self._limits
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise web.HTTPUnsupportedMediaType(reason="Content-Encoding: request bodies must not be compressed")
        if (request.content_length or 0) > limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(limits.body_bytes, request.content_length or 0)
        body = bytearray()
        try:
            content = request.content
            if content.is_eof():  # came with the head
                self._add(body, content.read_nowait())
            else:
                self._task = asyncio.current_task()
                self._bodies.arriving.add(self)
                async with timeout(limits.body_s):
                    async for part in content.iter_any():
                        self._add(body, part)
        except asyncio.TimeoutError:
            raise web.HTTPRequestTimeout from None
        except asyncio.CancelledError:
            if self._pushed_out:
                raise _too_many() from None
            raise
        except web.RequestPayloadError:
            raise RequestError("the request body is not what Transfer-Encoding says") from None
        finally:
            self._bodies.arriving.discard(self)
        whole, most = bytes(body), limits.body_brackets
        if len(whole) > most and max(whole.count(b"[") + whole.count(b"{"), whole.count(b":")) > most:
            raise RequestError(f"the request body has more than {most} arrays and objects, or fields")
        return whole

    def _add(self, body: bytearray, part: bytes) -> None:
        self._size += len(part)
        self._bodies.num_bytes += len(part)
        if self._size > self._limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.body_bytes, self._size)
        while self._bodies.num_bytes > self._limits.bodies_bytes:
            # Whoever stalls keeps nobody out.
            largest = max(self._bodies.arriving, key=lambda one: one._size, default=self)
            if largest._size <= self._size:
                raise _too_many()
            largest._push_out()
        body.extend(part)

    def _push_out(self) -> None:
        assert self._task is not None
        self._pushed_out = True
        self._task.cancel()
        self._bodies.arriving.discard(self)
        self._forget()

    def _forget(self) -> None:
        self._bodies.num_bytes -= self._size
        self._size = 0


def _too_many() -> OverloadedError:
    return OverloadedError("too many long requests at once")

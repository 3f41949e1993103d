"""Connections for legs: POSTs over plain HTTP whose answers are streamed.

A general client (aiohttp's, for all else) does much for each request and each part of an answer that a leg does not
need: redirects, cookies, proxies, and a reader and two tasks between the socket and the leg.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit

import aiohttp

from baton.openai.client import NotConnectedError
from baton.router.clients.http_answer import HttpAnswer
from baton.timeouts import timeout

_PIECE_BYTES = 2**16


class LegConnection(asyncio.Protocol):
    """One connection. As an answer it has a `status` and a `content` to read, like aiohttp's.

    Reading pauses while more than `most_bytes` of a body wait.
    """

    def __init__(self) -> None:
        self.idle: asyncio.TimerHandle | None = None  # closes it, while it is not used
        self.most_bytes = 0
        self._answer: HttpAnswer | None = None
        self._parts: list[bytes] = []
        self._num_waiting = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_full = False  # what was written waits for the server to read

    @property
    def status(self) -> int:
        return 0 if self._answer is None else self._answer.status

    @property
    def content(self) -> LegConnection:
        return self

    @property
    def is_open(self) -> bool:
        return self._error is None and not self._transport.is_closing()

    # ------------------------------------------------------------ asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.abort()  # nobody has asked
            return
        try:
            body = answer.feed(data)
        except ValueError as error:
            self._fail(error)
            return
        if body:
            self._parts.append(body)
            self._num_waiting += len(body)
            if self._num_waiting > self.most_bytes and not answer.is_whole:
                self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self._answer
        if answer is not None and exc is None and answer.status and answer.end():
            self._error = self._error or aiohttp.ServerDisconnectedError()
            self._wake()
        elif exc is not None:
            self._fail(exc)
        elif answer is None or not answer.status:
            self._fail(aiohttp.ServerDisconnectedError())
        else:
            self._fail(aiohttp.ClientPayloadError("the response payload is not completed"))

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    # ------------------------------------------------------------ an exchange

    async def post(self, head: bytes, body: Sequence[bytes]) -> None:
        """Send a request, and wait for the head of its answer. Raises what went wrong."""
        answer = self._answer = HttpAnswer()
        if sum(map(len, body)) <= _PIECE_BYTES:
            self._transport.write(b"".join([head, *body]))  # in one packet
        else:
            self._transport.write(head)
            for part in body:
                for start in range(0, len(part), _PIECE_BYTES):
                    while self._is_full and self._error is None and not answer.status:
                        await self._wait()
                    if self._error is not None or answer.status:
                        answer.keeps_open = False  # it is refused before it is whole
                        break
                    self._transport.write(memoryview(part)[start : start + _PIECE_BYTES])
        while not answer.status:
            self._check()
            await self._wait()

    async def readany(self) -> bytes:
        """More of the body; nothing at its end. Raises what went wrong."""
        answer = self._answer
        assert answer is not None
        while not self._parts:
            if answer.is_whole:
                return b""
            self._check()
            await self._wait()
        if self._num_waiting > self.most_bytes:
            self._transport.resume_reading()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_waiting = 0
        return body

    def release(self) -> bool:
        """The exchange is over. Returns whether there can be another; otherwise the connection is closed."""
        answer, self._answer = self._answer, None
        left, self._parts, self._num_waiting = bool(self._parts), [], 0
        if answer is not None and answer.is_whole and answer.keeps_open and not left and self.is_open:
            return True
        self.abort()
        return False

    def abort(self) -> None:
        self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._transport.abort()
        self._wake()


class LegConnections:
    """Connections by server. Those that are not used are in `idle`, and closed after `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self.keep_s = keep_s
        self.idle: defaultdict[str, list[LegConnection]] = defaultdict(list)
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def post(
        self,
        base: str,
        path: str,
        headers: Mapping[str, str],
        body: Sequence[bytes],
        connect_s: float | None,
        most_bytes: int,
    ) -> AsyncIterator[LegConnection]:
        """POST to `base`, http://HOST:PORT, and yield the connection once it has the answer's head.

        Leaving the block before the answer's end closes the connection. Raises `NotConnectedError`, aiohttp's errors
        for connections that break, `ValueError` for what is no answer, and for a header with a line break.
        """
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if fields.count("\n") != len(headers) or fields.count("\r") != len(headers):
            raise ValueError("a header has a line break")
        host = base.partition("//")[2]
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n".encode(errors="surrogateescape")
        connection = self._take(base) or await self._connect(base, connect_s)
        connection.most_bytes = most_bytes
        try:
            await connection.post(head, body)
            yield connection
        finally:
            if connection.release():
                self._keep(base, connection)

    def close(self) -> None:
        self._is_closed = True
        for connections in self.idle.values():
            for connection in connections:
                if connection.idle is not None:
                    connection.idle.cancel()
                connection.abort()
        self.idle.clear()

    def _take(self, base: str) -> LegConnection | None:
        idle = self.idle.get(base)
        while idle:
            connection = idle.pop()
            assert connection.idle is not None
            connection.idle.cancel()
            if connection.is_open:
                return connection
        return None

    def _keep(self, base: str, connection: LegConnection) -> None:
        if self._is_closed:
            connection.abort()
            return
        idle = self.idle[base]

        def drop() -> None:
            idle.remove(connection)
            connection.abort()

        connection.idle = asyncio.get_running_loop().call_later(self.keep_s, drop)
        idle.append(connection)

    async def _connect(self, base: str, connect_s: float | None) -> LegConnection:
        server = urlsplit(base)
        assert server.hostname is not None
        try:
            async with timeout(connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    LegConnection, server.hostname, server.port or 80
                )
        except asyncio.TimeoutError:
            raise NotConnectedError("it took too long to connect") from None
        except OSError as error:
            raise NotConnectedError(str(error)) from None
        return connection

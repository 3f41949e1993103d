"""POST over an aiohttp session's connections, with less CPU than its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp
from aiohttp import StreamReader
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

# Longer bodies are not copied.
_JOINED_BYTES = 2**16


class LegResponse:
    """`end` it: the connection is used again after whole responses."""

    __slots__ = ("_connection", "content", "status")

    def __init__(self, connection: aiohttp.connector.Connection, status: int, content: StreamReader) -> None:
        self._connection, self.status, self.content = connection, status, content

    def end(self) -> None:
        transport = self._connection.transport
        if transport is not None and transport.get_write_buffer_size():
            self._connection.close()  # not all was read
        else:
            self._connection.release()


class Posts:
    def __init__(self, session: aiohttp.ClientSession, base: str, headers: Mapping[str, str]) -> None:
        self._session, self._base, self._headers = session, base, headers
        self._heads: dict[str, tuple[aiohttp.ClientRequest, bytes]] = {}

    async def send(
        self,
        path: str,
        body: Sequence[bytes],
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        line_bytes: int,
    ) -> LegResponse:
        """`timeout`: to connect. Raises aiohttp's errors."""
        target, head = self._heads.get(path) or self._prepare(path)
        connector = self._session.connector
        if connector is None:
            raise aiohttp.ClientConnectionError("the session is closed")
        try:
            connection = await connector.connect(target, [], timeout)
        except asyncio.TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {target.url}") from error
        try:
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None:
                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=line_bytes)
            transport.set_write_buffer_limits(0)  # write at once
            size = sum(map(len, body))
            lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            first = b"%b%bContent-Length: %d\r\n\r\n" % (head, lines.encode(), size)
            for part in (first, *body) if size > _JOINED_BYTES else (b"".join((first, *body)),):
                transport.write(part)
            while True:
                message, content = await protocol.read()
                if message.code >= 200:
                    return LegResponse(connection, message.code, content)
        except HttpProcessingError as error:
            connection.close()
            raise aiohttp.ClientPayloadError(error.message) from error
        except BaseException:
            connection.close()
            raise

    def _prepare(self, path: str) -> tuple[aiohttp.ClientRequest, bytes]:
        """A connection's key, and the common part of heads."""
        url, loop = URL(self._base + path), asyncio.get_running_loop()
        headers = {"Content-Type": "application/json", **self._session.headers, **self._headers}
        target = aiohttp.ClientRequest("POST", url, headers=headers, loop=loop, session=self._session)
        kept = [f"{name}: {value}\r\n" for name, value in target.headers.items() if name.lower() != "content-length"]
        found = self._heads[path] = target, f"POST {url.raw_path_qs} HTTP/1.1\r\n{''.join(kept)}".encode()
        return found

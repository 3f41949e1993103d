"""TLS of client connections.

asyncio's TLS transport counts only bytes not encrypted yet, so it misses encrypted ones that the client does not read.
It also reads 256 KiB at once.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from typing import Any, cast

from baton.openai.http.connections import ClientConnection
from baton.openai.http.limits import HttpLimits
from baton.openai.http.turns import READ_BYTES, end_turn


async def connect(client: socket.socket, connection: ClientConnection, tls: ssl.SSLContext, limits: HttpLimits) -> None:
    """Returns after the handshake. Raises `OSError`, also after `HttpLimits.head_s`."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    times: dict[str, Any] = {"ssl_handshake_timeout": limits.head_s}
    if sys.version_info >= (3, 11):  # older versions do not wait for the client's closure
        times["ssl_shutdown_timeout"] = limits.write_s
    protocol = _Protocol(loop, connection, tls, done, server_side=True, **times)
    connection.tls = protocol
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, client)
    try:
        await done
    except BaseException:
        transport.abort()
        raise


class _Protocol(SSLProtocol):
    """asyncio's TLS, over the socket's transport."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._below.set_write_buffer_limits(high=1, low=0)
        if sys.version_info < (3, 11):  # it asks for no buffer, and runs in asyncio's event loop
            cast(Any, self._below).max_size = READ_BYTES
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return cast(memoryview, super().get_buffer(sizehint))[:READ_BYTES]  # type: ignore[misc]

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)  # type: ignore[misc]
        if nbytes == READ_BYTES:
            end_turn(self._below, lambda: bool(getattr(self, "_ssl_reading_paused", False)))

    def _get_write_buffer_size(self) -> int:
        """asyncio's implementation since Python 3.11, plus encrypted bytes not sent yet."""
        plain = int(super()._get_write_buffer_size()) if sys.version_info >= (3, 11) else 0  # type: ignore[misc]
        return plain + self._below.get_write_buffer_size()

    def get_write_buffer_size(self) -> int:
        return self._get_write_buffer_size()

    def abort(self) -> None:
        """asyncio's TLS transport ignores this after two closes."""
        self._below.abort()

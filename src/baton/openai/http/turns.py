"""Limits how much of a client's data one turn of the event loop parses.

Parsing a body in one-byte chunks takes 1 µs per byte. asyncio's transports read 256 KiB at once, uvloop's even more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from baton.openai.http.connections import ClientConnection

READ_BYTES = 2**14


class ShortTurns(asyncio.BufferedProtocol):
    """`buffer`: of `READ_BYTES`; connections of one event loop may share it."""

    def __init__(self, connection: ClientConnection, buffer: memoryview) -> None:
        self._connection, self._buffer = connection, buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def eof_received(self) -> None:
        self._connection.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(bytes(self._buffer[:nbytes]))
        if nbytes == len(self._buffer):
            end_turn(self._transport, self._connection.is_reading_paused)


def end_turn(transport: asyncio.Transport, is_paused: Callable[[], bool]) -> None:
    """`is_paused`: whether the protocol itself wants no more data."""

    def resume() -> None:
        if not is_paused() and not transport.is_closing():
            transport.resume_reading()

    if not is_paused() and not transport.is_closing():
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(resume)

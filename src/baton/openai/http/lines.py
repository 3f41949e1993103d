"""Lines of a streamed response, as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from aiohttp import StreamReader
from aiohttp.http_exceptions import LineTooLong

from baton.errors import ProtocolError

_SHOWN, _LINE_FEED = 100, 10
_READER = "baton_line_reader"


class LineReader:
    """Reads lines of at most `max_bytes` from `content`, without blank ones and one that `is_cut` at the end.

    While `next` waits, a line goes to `take` first, as it arrives, and is not returned if that returns True. aiohttp's
    own readers wake a task for each packet.
    """

    def __init__(self, content: StreamReader, max_bytes: int) -> None:
        self.content, self._max = content, max_bytes
        self._begun = bytearray()
        self._lines: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error = content.exception()
        self.ended = content.is_eof()
        self._num_left: int | None = None
        self.take: Callable[[bytes], bool] | None = None
        if self._error is None:
            self.feed(content.read_nowait())
        if not self.ended and self._error is None:
            cast(Any, content).__class__ = _PassedOn
            setattr(content._protocol, _READER, self)

    async def next(self) -> list[bytes]:
        """Lines without their ends, at least one; none at the end of the response.

        Raises `LineTooLong`, and the errors of aiohttp.
        """
        while not self._lines:
            if self._error is not None:
                raise self._error
            if self.ended:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        lines, self._lines = self._lines, []
        return lines

    async def read_to_end(self, limit: int) -> None:
        """Raises `ProtocolError` above `limit` bytes, and the errors of `next`."""
        self._num_left, self.take = limit, None
        while await self.next():
            pass

    @property
    def is_cut(self) -> bool:
        return self.ended and bool(self._begun)

    def feed(self, data: bytes) -> None:
        if self._num_left is not None:
            self._num_left -= len(data)
            if self._num_left < 0:
                self.fail(ProtocolError("the answer is larger than it may be"))
                return
        end, whole = data.find(b"\n"), len(data)
        if 0 < end >= whole - 2 and not self._begun and data[-1] == _LINE_FEED and end <= self._max:
            lines = [data[:end]]
        else:
            lines = []
            self._begun += data
            whole = len(self._begun)
            if end >= 0:
                *lines, rest = bytes(self._begun).split(b"\n")
                self._begun = bytearray(rest)
            if whole > self._max and max(map(len, (self._begun, *lines))) > self._max:
                longest = bytes(max((self._begun, *lines), key=len)[:_SHOWN])
                self.fail(LineTooLong(longest + b"...", self._max))
                return
        waiter = self._waiter
        try:
            for line in lines:
                waits = waiter is not None and not waiter.done() and not self._lines and self._error is None
                if line and not (waits and self.take is not None and self.take(line)):
                    self._lines.append(line)
        except Exception as error:
            self.fail(error)
        if self._lines:
            self._wake()

    def feed_end(self) -> None:
        self.ended = True
        self._leave()

    def fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._leave()

    def _leave(self) -> None:
        if _reader_of(self.content) is self:
            setattr(self.content._protocol, _READER, None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _PassedOn(StreamReader):
    """Passes data to the `LineReader` that its connection knows: aiohttp's parser makes contents, with fixed slots."""

    __slots__ = ()

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        reader: LineReader | None = getattr(self._protocol, _READER, None)
        if data and reader is not None and reader.content is self:
            reader.feed(data)
        return False

    def begin_http_chunk_receiving(self) -> None: ...

    def end_http_chunk_receiving(self) -> None: ...

    def feed_eof(self) -> None:
        reader = _reader_of(self)
        super().feed_eof()
        if reader is not None:
            reader.feed_end()

    def set_exception(self, exc: Any, *cause: Any) -> None:
        super().set_exception(exc, *cause)
        if (reader := _reader_of(self)) is not None:
            reader.fail(exc)


def _reader_of(content: StreamReader) -> LineReader | None:
    reader: LineReader | None = getattr(content._protocol, _READER, None)
    return reader if reader is not None and reader.content is content else None

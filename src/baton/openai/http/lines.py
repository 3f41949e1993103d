"""Lines of a streamed response, in batches of all that have arrived."""

from __future__ import annotations

from aiohttp import StreamReader
from aiohttp.http_exceptions import LineTooLong

_SHOWN = 100


class LineReader:
    """Reads lines of at most `max_bytes` from `content`. `is_cut`: the last line had no end.

    aiohttp's own iterator waits for each line separately, although several arrive together.
    """

    def __init__(self, content: StreamReader, max_bytes: int) -> None:
        self._content, self._max = content, max_bytes
        self._rest = b""
        self.is_cut = False

    async def next(self) -> list[bytes]:
        """Lines without their ends, at least one; none at the end of the response.

        Raises `LineTooLong`, and the errors of aiohttp.
        """
        while True:
            data = await self._content.readany()
            if not data:
                rest, self._rest = self._rest, b""
                self.is_cut = self.is_cut or bool(rest)
                return [rest] if rest else []
            if not self._rest and data.find(b"\n") == len(data) - 1 and len(data) <= self._max:
                return [data[:-1]]  # one line, the common case
            *lines, self._rest = (self._rest + data).split(b"\n")
            if max(map(len, (self._rest, *lines))) > self._max:
                raise LineTooLong(max([self._rest, *lines], key=len)[:_SHOWN] + b"...", self._max)
            if lines:
                return lines

"""Lines of a streamed answer, however it is cut into packets."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import LineTooLong

from baton.openai.http.lines import LineReader

TEXT = b'{"a":1}\r\n\ndata: "\xc3\xa9\x85\xe2\x80\xa8"\n\n: x\n'


def content() -> aiohttp.StreamReader:
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(Mock(spec=asyncio.Transport))
    return aiohttp.StreamReader(protocol, 2**16, loop=loop)


async def lines_of(*packets: bytes, max_bytes: int = 64) -> tuple[list[bytes], bool]:
    """All lines, and whether the last one was cut. Each packet comes when the ones before have been read."""
    stream = content()
    reader = LineReader(stream, max_bytes)

    async def send() -> None:
        for packet in packets:
            stream.feed_data(packet)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        stream.feed_eof()

    sending, found = asyncio.create_task(send()), list[bytes]()
    while lines := await reader.next():
        found += lines
    await sending
    return found, reader.is_cut


@pytest.mark.parametrize("place", range(len(TEXT) + 1))
async def test_lines_end_at_line_feeds_alone(place: int) -> None:
    assert await lines_of(TEXT[:place], TEXT[place:]) == (TEXT.split(b"\n")[:-1], False)


async def test_a_line_without_an_end_is_told() -> None:
    assert await lines_of(b"a\nb", b"c") == ([b"a", b"bc"], True)
    assert await lines_of() == ([], False)


@pytest.mark.parametrize("packets", [(b"a\n" + b"b" * 9,), (b"bbbb", b"bbbbb"), (b"b" * 9 + b"\n",)])
async def test_a_line_that_is_too_long_is_an_error(packets: tuple[bytes, ...]) -> None:
    with pytest.raises(LineTooLong):
        await lines_of(*packets, max_bytes=8)

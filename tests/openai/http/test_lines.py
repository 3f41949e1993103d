"""Lines of a streamed answer, however it is cut into packets."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import LineTooLong

from baton.errors import ProtocolError
from baton.openai.http.lines import LineReader

TEXT = b'{"a":1}\r\n\ndata: "\xc3\xa9\x85\xe2\x80\xa8"\n\n: x\n'


def connection() -> ResponseHandler:
    protocol = ResponseHandler(asyncio.get_running_loop())
    protocol.connection_made(Mock(spec=asyncio.Transport))
    return protocol


def content(protocol: ResponseHandler | None = None) -> aiohttp.StreamReader:
    return aiohttp.StreamReader(protocol or connection(), 2**16, loop=asyncio.get_running_loop())


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
    expected = [line for line in TEXT.split(b"\n") if line]
    assert await lines_of(TEXT[:place], TEXT[place:]) == (expected, False)


async def test_a_line_without_an_end_is_told_and_not_read() -> None:
    assert await lines_of(b"a\nb", b"c") == ([b"a"], True)
    assert await lines_of() == ([], False)


async def test_a_long_line_is_not_copied_with_each_of_its_packets() -> None:
    class Packet(bytes):
        def __radd__(self, other: bytes) -> bytes:
            assert isinstance(other, bytearray), "all before it is copied"
            return NotImplemented

    stream = content()
    reader = LineReader(stream, 64)
    for packet in (b"aa", b"bb", b"cc\nd", b"d", b"\n"):
        stream.feed_data(Packet(packet))
    assert await reader.next() == [b"aabbcc", b"dd"]


async def test_nothing_is_taken_after_the_end() -> None:
    stream = content()
    reader = LineReader(stream, 64)
    taken = list[bytes]()
    reader.take = lambda line: bool(taken.append(line)) or True
    dropping = asyncio.create_task(reader.read_to_end(64))
    await asyncio.sleep(0)
    stream.feed_data(b"a\n")
    stream.feed_eof()
    await dropping
    assert taken == []


@pytest.mark.parametrize("packets", [(b"a\n" + b"b" * 9,), (b"bbbb", b"bbbbb"), (b"b" * 9 + b"\n",)])
async def test_a_line_that_is_too_long_is_an_error(packets: tuple[bytes, ...]) -> None:
    with pytest.raises(LineTooLong):
        await lines_of(*packets, max_bytes=8)


async def test_lines_are_taken_when_they_arrive() -> None:
    stream = content()
    reader, taken = LineReader(stream, 64), list[bytes]()

    def take(line: bytes) -> bool:
        if line == b"c":
            return False
        taken.append(line)
        return True

    reader.take = take
    stream.feed_data(b"a\n")
    assert await reader.next() == [b"a"], "it came while nobody waited"
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    stream.feed_data(b"a\nb\n")
    assert taken == [b"a", b"b"]
    stream.feed_data(b"c\nd\n")
    assert taken == [b"a", b"b"], "order is kept after a line that is not taken"
    assert await waiting == [b"c", b"d"]


async def test_an_error_of_taking_is_raised_where_lines_are_read() -> None:
    stream = content()
    reader = LineReader(stream, 64)
    reader.take = lambda line: bool(line.index(b"x"))
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    stream.feed_data(b"a\n")
    with pytest.raises(ValueError, match="subsection"):
        await waiting


async def test_data_that_came_before_the_reader_counts() -> None:
    stream = content()
    stream.feed_data(b"a\nb")
    reader = LineReader(stream, 64)
    stream.feed_data(b"c\n")
    stream.feed_eof()
    assert [await reader.next(), await reader.next()] == [[b"a", b"bc"], []]
    ended = content()
    ended.feed_data(b"a\n")
    ended.feed_eof()
    reader = LineReader(ended, 64)
    assert [await reader.next(), await reader.next()] == [[b"a"], []]


async def test_lines_before_an_error_are_read() -> None:
    stream = content()
    reader = LineReader(stream, 64)
    stream.feed_data(b"a\n")
    stream.set_exception(aiohttp.ClientPayloadError("cut"))
    assert await reader.next() == [b"a"]
    with pytest.raises(aiohttp.ClientPayloadError):
        await reader.next()


async def test_the_end_of_a_response_is_not_that_of_the_next_one() -> None:
    """aiohttp closes the content of a response when it is released, by which time another may use the connection."""
    protocol = connection()
    first = content(protocol)
    LineReader(first, 64)
    first.feed_eof()
    second = content(protocol)
    reader = LineReader(second, 64)
    first.set_exception(aiohttp.ClientConnectionError("closed"))
    second.feed_data(b"a\n")
    assert await reader.next() == [b"a"]


@pytest.mark.parametrize("rest", [b"aaaa\n" * 3, b"\n" * 15, b"a" * 15], ids=["lines", "blank", "line"])
@pytest.mark.parametrize("limit", [14, 15])
async def test_the_rest_of_a_response_is_bounded(rest: bytes, limit: int) -> None:
    stream = content()
    reader = LineReader(stream, 64)
    stream.feed_data(b"first\n")
    assert await reader.next() == [b"first"]
    dropping = asyncio.create_task(reader.read_to_end(limit))
    await asyncio.sleep(0)
    stream.feed_data(rest[:9])
    stream.feed_data(rest[9:])
    stream.feed_eof()
    (error,) = await asyncio.gather(dropping, return_exceptions=True)
    assert isinstance(error, ProtocolError) == (limit < len(rest))

"""An HTTP/1.1 answer from its bytes, in whatever pieces they come."""

from __future__ import annotations

import re
from enum import Enum

_MAX_HEAD_BYTES = 2**16
_MAX_LINE_BYTES = 2**12  # of a chunk's size, and of a trailer
_STATUS = re.compile(r"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")


class _Next(Enum):
    HEAD = 1
    SIZE = 2  # of a chunk
    DATA = 3  # `_left` bytes of a chunk or body
    AFTER_DATA = 4
    TRAILER = 5
    ALL = 6  # the body ends with the connection
    NOTHING = 7


class HttpAnswer:
    """`status` 0: the head is not whole yet. `keeps_open`: the connection can be used again, once `is_whole`."""

    def __init__(self) -> None:
        self.status = 0
        self.keeps_open = True
        self._next = _Next.HEAD
        self._raw = b""  # the beginning of a head or line
        self._left = 0
        self._is_chunked = False

    @property
    def is_whole(self) -> bool:
        return self._next is _Next.NOTHING

    def end(self) -> bool:
        """The connection has ended. Returns whether the answer is whole."""
        if self._next is _Next.ALL:
            self._next = _Next.NOTHING
        return self.is_whole

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes of the body in `data`. Raises `ValueError` for what is no answer."""
        if self._raw:
            data, self._raw = self._raw + data, b""
        if self._next is _Next.HEAD:
            data = self._read_head(data)
        if self._is_chunked:
            return self._read_chunks(data)
        if self._next is _Next.DATA:
            body, data = data[: self._left], data[self._left :]
            self._left -= len(body)
            if not self._left:
                self._next = _Next.NOTHING
        elif self._next is _Next.ALL:
            return data
        else:
            body = b""
        if data:
            self.keeps_open = False  # nobody has asked for it
        return body

    def _read_chunks(self, data: bytes) -> bytes:
        parts: list[bytes] = []
        at = 0
        while self._next is not _Next.NOTHING:
            if self._next is _Next.DATA:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
                self._next = _Next.AFTER_DATA
            stop = data.find(b"\r\n", at)
            if (stop if stop >= 0 else len(data)) - at > _MAX_LINE_BYTES:
                raise ValueError("a line between chunks is too long")
            if stop < 0:
                self._raw = data[at:]
                break
            self._read_line(data[at:stop])
            at = stop + 2
            end = at + self._left
            if self._next is _Next.DATA and data[end : end + 2] == b"\r\n":  # all of it, as for most tokens
                parts.append(data[at:end])
                at, self._left, self._next = end + 2, 0, _Next.SIZE
        else:
            self.keeps_open = self.keeps_open and at == len(data)  # nobody has asked for more
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_line(self, line: bytes) -> None:
        """A line of a chunked body: around chunks, or after the last."""
        if self._next is _Next.AFTER_DATA:
            if line:
                raise ValueError("a chunk has another size than it says")
            self._next = _Next.SIZE
        elif self._next is _Next.SIZE:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise ValueError(f"a chunk's size is {line[:20]!r}")
            self._left = int(size[1], 16)
            self._next = _Next.DATA if self._left else _Next.TRAILER
        elif not line:
            self._next = _Next.NOTHING

    def _read_head(self, data: bytes) -> bytes:
        """Returns what follows the head; nothing while it is not whole."""
        while True:
            head, found, rest = data.partition(b"\r\n\r\n")
            if len(head) > _MAX_HEAD_BYTES:
                raise ValueError(f"a head of more than {_MAX_HEAD_BYTES} bytes")
            if not found:
                self._raw = data
                return b""
            first, *lines = head.decode("latin-1").split("\r\n")
            status = _STATUS.fullmatch(first)
            if status is None:
                raise ValueError(f"no HTTP answer: {first[:40]!r}")
            data = rest
            if not status[2].startswith("1"):  # others, such as 100 Continue, precede the answer
                break
        self.status = int(status[2])
        self._read_fields(lines, status[1] == "1")
        return data

    def _read_fields(self, lines: list[str], is_current: bool) -> None:
        """`is_current`: HTTP/1.1, whose connections stay open by themselves."""
        fields: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            name = name.lower()
            if not colon or not name or name != name.strip() or (name in fields and name in _ONCE):
                raise ValueError(f"a malformed header: {line[:40]!r}")
            fields[name] = value.strip().lower()
        connection = fields.get("connection", "keep-alive" if is_current else "close")
        self.keeps_open = "close" not in connection
        coding, length = fields.get("transfer-encoding"), fields.get("content-length")
        if coding is not None:
            if coding != "chunked" or length is not None:
                raise ValueError(f"transfer-encoding {coding!r} with content-length {length}")
            self._is_chunked, self._next = True, _Next.SIZE
        elif self.status in (204, 304):
            self._next = _Next.NOTHING
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) < 16):
                raise ValueError(f"content-length is {length[:20]!r}")
            self._left = int(length)
            self._next = _Next.DATA if self._left else _Next.NOTHING
        else:
            self._next, self.keeps_open = _Next.ALL, False


# Twice, they would make the end of the body a matter of taste.
_ONCE = ("content-length", "transfer-encoding")

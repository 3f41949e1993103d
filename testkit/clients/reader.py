"""A client over a plain socket, which reads only when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

# About 400 KB per choice: more than the sockets of a `Reader` hold, plus asyncio's buffer before it pauses.
LONG = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "logprobs": 5, "stream": True}


class Reader:
    def __init__(self, url: str, path: str = "/v1/completions", body: Any = LONG) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((host, int(port)))
        self.socket.setblocking(False)
        self.ask(path, json.dumps(body).encode())

    def ask(self, path: str, data: bytes = b"") -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.send(head.encode() + data)

    async def read(self, most: int = 2**16) -> bytes:
        """The next bytes; empty at the end. Raises `ConnectionResetError` if the connection was cut off."""
        return await asyncio.get_running_loop().sock_recv(self.socket, most)

    async def text(self) -> bytes:
        """All bytes to the end of a stream. Raises as `read` does."""
        whole = b""
        while not whole.endswith(b"0\r\n\r\n"):
            part = await self.read()
            if not part:
                raise ConnectionResetError
            whole += part
        return whole

    async def until_cut(self, most: int = 2**16, pause_s: float = 0.0) -> None:
        """Read until the connection is cut off, at most `most` bytes before each pause."""
        with contextlib.suppress(ConnectionResetError):
            while await self.read(most):
                await asyncio.sleep(pause_s)

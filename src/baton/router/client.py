"""HTTP client of one engine's `/inference/v1`. Every failure comes out as a Baton error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

import aiohttp
import msgspec

from baton.errors import BatonError, EngineLostError, EngineUnavailableError, ProtocolError, RequestError
from baton.router.timers import RouterTimers
from baton.wire import EngineInfo, EngineLoad, GenerateRequest, TokenChunk

_MAX_LINE_BYTES = 2**20
_MAX_ASK_BYTES = 2**20

T = TypeVar("T")


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return a response's whole body. Raises `ProtocolError` when it is longer than `limit` bytes."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > limit:
            raise ProtocolError(f"{response.url} answers with more than {limit} bytes")
    return bytes(body)


def new_session() -> aiohttp.ClientSession:
    """Return a session for `EngineClient`s: unlimited connections, no cookies, room for long lines."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=_MAX_LINE_BYTES,
        trust_env=False,
    )


class EngineClient:
    """Talks to the engine at one base URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers) -> None:
        self._session = session
        self.url = url
        self._ask_timeout = aiohttp.ClientTimeout(total=timers.answer)
        # A leg may wait long for its turn: whether its engine lives is seen from its answers to other questions.
        self._leg_timeout = aiohttp.ClientTimeout(total=None, sock_connect=timers.connect)

    async def info(self) -> EngineInfo:
        """Return the engine's identity.

        Raises `EngineLostError` when the engine is silent, `EngineUnavailableError` when it is not there,
        `ProtocolError` when it is something else.
        """
        return await self._ask("/inference/v1/info", EngineInfo)

    async def load(self) -> EngineLoad:
        """Return the engine's load. Raises `EngineUnavailableError` or `ProtocolError`."""
        return await self._ask("/inference/v1/load", EngineLoad)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield one leg's chunks; closing the generator closes the connection, which aborts the leg.

        Raises `RequestError` (refused for good), `EngineUnavailableError` (the engine cannot be reached, or does not
        take this attempt), `EngineLostError` (it may have taken it, and went away) or `ProtocolError`.
        """
        try:
            async with self._session.post(
                f"{self.url}/inference/v1/generate",
                data=msgspec.json.encode(request),
                headers={"Content-Type": "application/json"},
                timeout=self._leg_timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise _refusal(self.url, response.status, await response.content.read(2**16))
                async for line in response.content:
                    if not line.endswith(b"\n"):
                        raise EngineLostError(f"engine {self.url} went away in mid-stream")
                    chunk = msgspec.json.decode(line, type=TokenChunk)
                    if chunk.finish_reason is not None:
                        # Reading the end that follows keeps the connection for the next request.
                        await response.content.read()
                    yield chunk
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnavailableError(f"engine {self.url}: {_describe(error)}") from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise EngineLostError(f"engine {self.url}: {_describe(error)}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolError(f"engine {self.url} sent a malformed chunk: {error}") from None

    async def _ask(self, path: str, kind: type[T]) -> T:
        try:
            async with self._session.get(self.url + path, timeout=self._ask_timeout, allow_redirects=False) as response:
                body = await read_body(response, _MAX_ASK_BYTES)
                if response.status != 200:
                    raise EngineUnavailableError(f"engine {self.url}: HTTP {response.status} from {path}")
        except asyncio.TimeoutError:
            raise EngineLostError(f"engine {self.url} does not answer") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnavailableError(f"engine {self.url}: {_describe(error)}") from None
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.url} is not a Baton engine: {error}") from None


def _refusal(url: str, status: int, body: bytes) -> BatonError:
    message, param = f"HTTP {status}", None
    try:
        fields = msgspec.json.decode(body, type=dict[str, dict[str, str | None]])["error"]
        message, param = fields.get("message") or message, fields.get("param")
    except (msgspec.DecodeError, KeyError):
        pass  # not one of our error bodies: the status says enough
    if status == 400:
        return RequestError(message, param)
    return EngineUnavailableError(f"engine {url}: {message}")


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__

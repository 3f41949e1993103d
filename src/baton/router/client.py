"""HTTP client of one engine's `/inference/v1`. Every failure comes out as a Baton error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from baton.errors import (
    BatonError,
    EngineLostError,
    EngineUnavailableError,
    OverloadedError,
    ProtocolError,
    RequestError,
)
from baton.openai.errors import ENGINE_STALLED
from baton.router.timers import RouterTimers
from baton.wire import EngineInfo, EngineLoad, GenerateRequest, PromptIds, TokenChunk

_MAX_LINE_BYTES = 2**20
_MAX_ASK_BYTES = 2**20
_MAX_REFUSAL_BYTES = 2**16
_PIECE_BYTES = 2**16

T = TypeVar("T")
_Response = AbstractAsyncContextManager[aiohttp.ClientResponse]


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return a response's whole body. Raises `ProtocolError` when it is longer than `limit` bytes."""
    body = await _read_start(response, limit)
    if len(body) > limit:
        raise ProtocolError(f"{response.url} answers with more than {limit} bytes")
    return body


async def read_refusal(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a response that is not a success, cut where it is long."""
    return await _read_start(response, _MAX_REFUSAL_BYTES)


def decode_body(url: str, what: str, body: bytes, kind: type[T]) -> T:
    """Return what an engine answers. Raises `ProtocolError`: it is not `what` it should be."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{url} is not {what}: {error}") from None


@contextlib.contextmanager
def leg_errors(url: str) -> Iterator[None]:
    """Bring out what goes wrong with a leg as a Baton error; see `EngineClient.generate`."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineUnavailableError(f"engine {url}: {_describe(error)}") from None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise EngineLostError(f"engine {url}: {_describe(error)}") from None
    except (msgspec.DecodeError, LineTooLong, ValueError, RecursionError) as error:
        raise ProtocolError(f"engine {url} sent a malformed answer: {error}") from None


def new_session() -> aiohttp.ClientSession:
    """Return a session for `EngineClient`s: unlimited connections, no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        cookie_jar=aiohttp.DummyCookieJar(),
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

        Raises `EngineLostError` when the engine is silent or says that it hangs, `EngineUnavailableError` when it is
        not there, `ProtocolError` when it is something else.
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
        with leg_errors(self.url):
            body = _leg_body(request)
            async with self._post("/inference/v1/generate", body, self._leg_timeout, _MAX_LINE_BYTES) as response:
                if response.status != 200:
                    raise _refusal(self.url, response.status, await read_refusal(response))
                async for line in response.content:
                    if not line.endswith(b"\n"):
                        raise EngineLostError(f"engine {self.url} went away in mid-stream")
                    chunk = msgspec.json.decode(line, type=TokenChunk)
                    if chunk.finish_reason is not None:
                        # Reading the end that follows keeps the connection for the next request.
                        await read_body(response, _MAX_ASK_BYTES)
                    yield chunk

    def _post(self, path: str, body: Sequence[bytes], timeout: aiohttp.ClientTimeout, line_bytes: int) -> _Response:
        return self._session.post(
            self.url + path,
            data=_pieces(body),
            headers={"Content-Type": "application/json", "Content-Length": str(sum(map(len, body)))},
            timeout=timeout,
            allow_redirects=False,
            read_bufsize=line_bytes,
        )

    async def _ask(self, path: str, kind: type[T]) -> T:
        return decode_body(self.url, "a Baton engine", await self._get(path, _MAX_ASK_BYTES), kind)

    async def _get(self, path: str, limit: int) -> bytes:
        try:
            async with self._session.get(self.url + path, timeout=self._ask_timeout, allow_redirects=False) as response:
                body = await read_body(response, limit)
                if response.status == 503 and ENGINE_STALLED.encode() in body:
                    # It answers, but what it holds moves no more than that of a silent one.
                    raise EngineLostError(f"engine {self.url} is stalled")
                if response.status != 200:
                    raise EngineUnavailableError(f"engine {self.url}: HTTP {response.status} from {path}")
                return body
        except asyncio.TimeoutError:
            raise EngineLostError(f"engine {self.url} does not answer") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnavailableError(f"engine {self.url}: {_describe(error)}") from None


def _leg_body(request: GenerateRequest) -> list[bytes]:
    """The request as JSON, in parts. That of the prompt is shared by all legs of all its samples."""
    prompt = request.prompt_token_ids
    if not isinstance(prompt, PromptIds):
        return [msgspec.json.encode(request)]
    rest = msgspec.json.encode(msgspec.structs.replace(request, prompt_token_ids=[]))
    # No text can hold this: its quotes would be escaped.
    before, name, after = rest.partition(b'"prompt_token_ids":')
    return [before + name, prompt.json(), after.removeprefix(b"[]")]


async def _pieces(body: Sequence[bytes]) -> AsyncGenerator[memoryview, None]:
    for part in body:
        for start in range(0, len(part), _PIECE_BYTES):
            yield memoryview(part)[start : start + _PIECE_BYTES]


async def _read_start(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > limit:
            break
    return bytes(body)


def _refusal(url: str, status: int, body: bytes) -> BatonError:
    message, param = f"HTTP {status}", None
    try:
        fields = msgspec.json.decode(body, type=dict[str, dict[str, str | None]])["error"]
        message, param = fields.get("message") or message, fields.get("param")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        pass  # not one of our error bodies: the status says enough
    if status == 400:
        return RequestError(message, param)
    if status == 429:
        return OverloadedError(f"engine {url}: {message}")
    return EngineUnavailableError(f"engine {url}: {message}")


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__

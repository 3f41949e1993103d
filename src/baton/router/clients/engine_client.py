"""HTTP clients of engines. Every failure is raised as a Baton error."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from baton.errors import (
    BatonError,
    DrainingError,
    EngineLostError,
    EngineUnavailableError,
    LegRefusedError,
    OverloadedError,
    ProtocolError,
    RequestError,
    ShortageError,
)
from baton.event_loop import timeout as time_limit
from baton.openai.answers import decode_answer, read_error
from baton.openai.backend import Take
from baton.openai.client import KEEP_ALIVE_S, PLAIN, convert_errors, error_line, read_body, read_refusal
from baton.openai.http.api_errors import DRAINING, ENGINE_STALLED
from baton.openai.http.lines import LineReader
from baton.openai.http.tracing import TRACE
from baton.router.clients.address import split_rank
from baton.router.clients.posts import LegResponse, Posts
from baton.router.leg_tasks import Chunks
from baton.router.timers import RouterTimers
from baton.wire import EngineInfo, EngineLoad, GenerateRequest, PromptIds, TokenChunk

_MAX_LINE_BYTES = 2**20
# The most bytes of an entry of a prompt's logprobs.
_SCORE_BYTES = 80
_MAX_ASK_BYTES = 2**20
_MAX_METRICS_BYTES = 2**24
_END_S = 0.5
_PAUSE_S = 0.2
_NO_HEADERS: Mapping[str, str] = {}
_CHUNKS = msgspec.json.Decoder(TokenChunk)
# Errors of connecting while this process has no descriptor, port or memory left.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)

T = TypeVar("T")


def new_session() -> aiohttp.ClientSession:
    """Without compression."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=PLAIN,
        auto_decompress=False,
        trust_env=False,
    )


class EngineClient(ABC):
    """Raises `RequestError` for the URL of a data-parallel rank, unless `has_ranks`."""

    has_ranks: ClassVar[bool] = False

    def __init__(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers) -> None:
        self._session = session
        self.url = url
        self._base, self.rank = split_rank(url)
        if self.rank is not None and not self.has_ranks:
            raise RequestError(
                f"{url}: only vLLM and SGLang servers with Baton's plug-in have data-parallel ranks", "url"
            )
        self._headers = {} if self.rank is None else {"X-data-parallel-rank": str(self.rank)}
        self._posts = Posts(session, self._base, self._headers)
        self._converting = convert_errors(f"engine {url}", EngineUnavailableError)
        self._ask_timeout = aiohttp.ClientTimeout(total=timers.answer)
        # Legs may wait long: `info` detects dead engines.
        self._leg_timeout = aiohttp.ClientTimeout(total=None, sock_connect=timers.connect)

    @functools.cached_property
    def host(self) -> str | None:
        return urlsplit(self.url).hostname

    @abstractmethod
    async def info(self) -> EngineInfo:
        """Raises `EngineLostError` if the engine does not answer or reports a stall, `EngineUnavailableError` if it
        cannot be reached, `ShortageError` if it could not be asked, `ProtocolError` if it is not an engine of this
        kind.
        """

    @abstractmethod
    async def load(self) -> EngineLoad:
        """Raises `EngineUnavailableError` or `ProtocolError`."""

    async def metrics_text(self) -> str:
        """Raises `EngineUnavailableError`, `ProtocolError`."""
        try:
            return (await self._get("/metrics", _MAX_METRICS_BYTES)).decode()
        except UnicodeDecodeError:
            raise ProtocolError(f"the metrics of {self.url} are no text") from None

    @abstractmethod
    def generate(self, request: GenerateRequest) -> Chunks:
        """Closing the generator closes the connection, which aborts the request.

        Raises `RequestError` (refused for good), `LegRefusedError`, `EngineUnavailableError` (not reached, or
        it cannot serve now), `EngineLostError` (the engine may have taken the request and was lost) or `ProtocolError`.
        """

    def _answer(self, path: str, body: Sequence[bytes], line_bytes: int) -> AbstractAsyncContextManager[LegResponse]:
        """POST with the current trace's headers, and yield a response with status 200. Raises the errors of
        `generate`.
        """
        trace = TRACE.get()
        headers = trace.headers() if trace is not None else _NO_HEADERS
        sending = self._posts.send(path, body, headers, self._leg_timeout, line_bytes)
        return _Answering(self.url, sending, self._converting)

    async def _get(self, path: str, limit: int, timeout: aiohttp.ClientTimeout | None = None) -> bytes:
        timeout, now = timeout or self._ask_timeout, asyncio.get_running_loop().time
        until = now() + (timeout.total or math.inf)
        try:
            async with self._session.get(self._base + path, timeout=timeout, allow_redirects=False) as response:
                body = await read_body(response.content, limit)
                if response.status == 503 and ENGINE_STALLED.encode() in body:
                    # Its requests make no progress.
                    raise EngineLostError(f"engine {self.url} is stalled")
                if response.status == 503 and DRAINING.encode() in body:
                    raise DrainingError(f"engine {self.url} is draining")
                if response.status != 200:
                    raise EngineUnavailableError(f"engine {self.url}: HTTP {response.status} from {path}")
                return body
        except asyncio.TimeoutError:
            if now() > until + _PAUSE_S:  # this process paused
                return await self._get(path, limit, timeout)
            raise EngineLostError(f"engine {self.url} does not answer") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            short = isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _SHORTAGES
            kind = ShortageError if short else EngineUnavailableError
            raise kind(f"engine {self.url}: {error_line(error)}") from None


class _Answering:
    __slots__ = ("_answer", "_convert", "_sending", "_url")

    def __init__(self, url: str, sending: Coroutine[Any, Any, LegResponse], converting: convert_errors) -> None:
        self._url, self._sending, self._convert = url, sending, converting

    async def __aenter__(self) -> LegResponse:
        with self._convert:
            answer = self._answer = await self._sending
            if answer.status == 200:
                return answer
            try:
                raise error_of_response(self._url, answer.status, await read_refusal(answer.content))
            finally:
                answer.end()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._answer.end()
        self._convert.__exit__(kind, error, trace)


class BatonClient(EngineClient):
    """Baton's own engines: `GenerateRequest` as JSON, and a `TokenChunk` per line."""

    async def info(self) -> EngineInfo:
        return await self._ask("/inference/v1/info", EngineInfo)

    async def load(self) -> EngineLoad:
        return await self._ask("/inference/v1/load", EngineLoad)

    async def generate(self, request: GenerateRequest) -> Chunks:
        body = _leg_body(request)
        line_bytes = _MAX_LINE_BYTES + _scores_bytes(request)
        async with self._answer("/inference/v1/generate", body, line_bytes) as response:
            reader = LineReader(response.content, line_bytes)
            while lines := await reader.next():
                for line in lines:
                    chunk = _CHUNKS.decode(line)
                    if chunk.finish_reason is not None:
                        await reader.read_to_end(_MAX_ASK_BYTES)
                        yield chunk
                        return
                    if (take := (yield chunk)) is not None:
                        reader.take = functools.partial(_take_line, take)
            if reader.is_cut:
                raise EngineLostError(f"engine {self.url} went away in mid-stream")

    async def _ask(self, path: str, kind: type[T]) -> T:
        return decode_answer(await self._get(path, _MAX_ASK_BYTES), kind, f"{self.url} is not a Baton engine")


async def finish(reader: LineReader) -> None:
    """So that the connection can be reused: uvicorn ends a response in another packet."""
    if not reader.ended:
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, BatonError, OSError):
            async with time_limit(_END_S):
                await reader.read_to_end(_MAX_ASK_BYTES)


def _take_line(take: Take, line: bytes) -> bool:
    return take(_CHUNKS.decode(line))


def _scores_bytes(request: GenerateRequest) -> int:
    """An upper bound: all prompt logprobs come in one chunk."""
    num_logprobs = request.sampling_params.prompt_logprobs
    return 0 if num_logprobs is None else _SCORE_BYTES * (1 + num_logprobs) * len(request.prompt_token_ids)


def _leg_body(request: GenerateRequest) -> list[bytes]:
    """JSON in parts. All legs of all samples share the prompt's part."""
    prompt = request.prompt_token_ids
    if not isinstance(prompt, PromptIds):
        return [msgspec.json.encode(request)]
    rest = msgspec.json.encode(msgspec.structs.replace(request, prompt_token_ids=[]))
    # Safe to split on: quotes inside a JSON string are escaped.
    before, name, after = rest.partition(b'"prompt_token_ids":')
    return [before + name, prompt.json(), after.removeprefix(b"[]")]


def error_of_response(url: str, status: int, body: bytes) -> BatonError:
    said = read_error(body)
    message = said.message or f"HTTP {status}"
    if status == 400:
        return RequestError(message, said.param)
    if status == 429:
        return OverloadedError(f"engine {url}: {message}")
    if status == 503:
        return EngineUnavailableError(f"engine {url}: {message}")
    return LegRefusedError(f"engine {url}: {message}", status, said.code if isinstance(said.code, str) else None)

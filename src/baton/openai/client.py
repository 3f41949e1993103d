"""The HTTP client of OpenAI-compatible servers; checks sizes and types of responses."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.errors import (
    ConfigError,
    EngineLostError,
    EngineUnavailableError,
    HandoffError,
    OverloadedError,
    ProtocolError,
)
from baton.openai.answers import (
    ChatCompletion,
    Completion,
    Model,
    Models,
    decode_answer,
    printable_line,
    read_error,
    refusal_in,
)
from baton.sampling_params import TokenId
from baton.urls import split_http_url

MAX_BODY_BYTES = 32 * 2**20
# Compressed bodies would defeat limits.
PLAIN = {"Accept-Encoding": "identity"}
# Less than servers' (vLLM's is 5 s): requests on a closing connection fail.
KEEP_ALIVE_S = 3.0
_MAX_REFUSAL_BYTES = 2**16
_EVENT, _DONE = b"data:", b"[DONE]"
_MALFORMED = (msgspec.DecodeError, LineTooLong, ValueError, RecursionError)
_CONVERTED = (aiohttp.ClientError, OSError, asyncio.TimeoutError, *_MALFORMED)
_COMPLETIONS = msgspec.json.Decoder(Completion)


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[TokenId]


def base_url(url: str, field: str) -> str:
    """`http://host:port[/prefix]`, without a trailing `/v1`. Raises `ConfigError` for `field`."""
    if split_http_url(url) is None:
        raise ConfigError(field, f"must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


class convert_errors(msgspec.Struct, frozen=True):
    """Convert errors to `EngineLostError` (the server `where` may have taken the request), `unreached`, or
    `ProtocolError` (its response is malformed)."""

    where: str
    unreached: type[EngineUnavailableError] = EngineLostError

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, _CONVERTED):
            error.__traceback__ = None  # holds the stream that holds it
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise self.unreached(f"{self.where}: {error_line(error)}") from None
        if isinstance(error, asyncio.TimeoutError):
            raise EngineLostError(f"{self.where}: no answer in time") from None
        if isinstance(error, aiohttp.ClientError | OSError):
            raise EngineLostError(f"{self.where}: {error_line(error)}") from None
        if isinstance(error, _MALFORMED):
            raise ProtocolError(f"{self.where}: the answer is malformed: {error_line(error)}") from None


def error_line(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        cause = error.os_error
        why = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror or str(cause)
        return printable_line(f"cannot connect: {why}")
    return printable_line(str(error) or type(error).__name__)


async def read_body(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Raises `ProtocolError` above `limit` bytes."""
    body = await _read_start(content, limit)
    if len(body) > limit:
        raise ProtocolError(f"the answer is larger than {limit} bytes")
    return body


async def read_refusal(content: aiohttp.StreamReader) -> bytes:
    return (await _read_start(content, _MAX_REFUSAL_BYTES))[:_MAX_REFUSAL_BYTES]


def read_event(line: bytes, url: str) -> Completion | Literal["done"] | None:
    """Raises `RequestError` for the event of a refusal, `HandoffError` for another error, and msgspec's errors."""
    data = line.strip().removeprefix(_EVENT).lstrip()
    if data == _DONE:
        return "done"
    if not data or data.startswith(b":"):
        return None
    event = _COMPLETIONS.decode(data)
    if event.error is not None:
        raise refusal_in(event.error) or HandoffError("engine_error", f"{url}: {event.error.get('message')}")
    return event


def read_samples(text: str) -> list[Sample]:
    """Parse a `/metrics` page. Raises `ProtocolError`."""
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ProtocolError(f"the metrics are malformed: {printable_line(str(error))}") from None


@contextlib.asynccontextmanager
async def connected_client(
    url: str, timeout_s: float | None = None, api_key: str | None = None, rank: str | None = None
) -> AsyncIterator[OpenAIClient]:
    """A client with its own session. `timeout_s`: of a request with its response. `rank`: the data-parallel rank of a
    vLLM server that answers completions.
    """
    headers = dict(PLAIN)
    if rank is not None:
        headers["X-data-parallel-rank"] = rank
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    # A limit would silently delay requests.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, auto_decompress=False
    ) as session:
        yield OpenAIClient(session, url)


class OpenAIClient:
    """A server's API.

    All methods raise the errors of `convert_errors` (`EngineLostError` also if a response ends early),
    `OverloadedError` for HTTP status 429, `EngineUnavailableError` for any other but 200 (redirects are not followed),
    and `ProtocolError` for a response that is too large.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def model(self) -> Model:
        """The first in the server's list."""
        models = decode_answer(await self.fetch("GET", f"{self.url}/v1/models"), Models).data
        if not models:
            raise ProtocolError("the server lists no model")
        return models[0]

    async def complete(self, body: dict[str, Any]) -> Completion:
        """The result has at least one choice."""
        return _with_choices(decode_answer(await self.fetch("POST", f"{self.url}/v1/completions", body), Completion))

    async def chat(self, body: dict[str, Any]) -> Completion:
        """The result has at least one choice, and no messages."""
        answer = decode_answer(await self.fetch("POST", f"{self.url}/v1/chat/completions", body), ChatCompletion)
        return _with_choices(answer.of_completion())

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Completion, None]:
        """Raises `HandoffError` for an error event."""
        url = f"{self.url}/v1/completions"
        async with self._answer("POST", url, {**body, "stream": True}) as response:
            async for line in response.content:
                event = read_event(line, url)
                if event == "done":
                    return
                if event is not None:
                    yield event
        raise EngineLostError(f"{url} went away in mid-stream")

    async def tokenize(self, model: str, prompt: str, add_special_tokens: bool = True) -> list[int]:
        body = {"model": model, "prompt": prompt, "add_special_tokens": add_special_tokens}
        return decode_answer(await self.fetch("POST", f"{self.url}/tokenize", body), _Tokens).tokens

    async def samples(self, url: str | None = None) -> list[Sample]:
        """Samples of a `/metrics` page, by default the server's own."""
        return read_samples((await self.fetch("GET", url or f"{self.url}/metrics")).decode(errors="replace"))

    async def fetch(self, method: str, url: str, body: dict[str, Any] | None = None) -> bytes:
        async with self._answer(method, url, body) as response:
            return await read_body(response.content, MAX_BODY_BYTES)

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, url: str, body: dict[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        with convert_errors(url):
            async with self._session.request(
                method, url, json=body, allow_redirects=False, read_bufsize=MAX_BODY_BYTES
            ) as response:
                if response.status != 200:
                    raise await _refused(response, url)
                yield response


def _with_choices(completion: Completion) -> Completion:
    if not completion.choices:
        raise ProtocolError("the answer has no choices")
    return completion


async def _refused(response: aiohttp.ClientResponse, url: str) -> EngineUnavailableError | OverloadedError:
    body, status = await read_refusal(response.content), response.status
    text = read_error(body).message or body.decode(errors="replace")
    if 300 <= status < 400:
        text = "redirects are not followed"
    elif text.lstrip().startswith("<"):
        text = "a page of HTML"
    message = f"{url}: HTTP {status}: {printable_line(text)}"
    return OverloadedError(message) if status == 429 else EngineUnavailableError(message, status)


async def _read_start(content: aiohttp.StreamReader, limit: int) -> bytes:
    body = bytearray()
    while part := await content.readany():
        body += part
        if len(body) > limit:
            break
    return bytes(body)

"""HTTP client of one OpenAI-compatible server. Nothing that it sends is trusted: sizes and types are checked."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec

from baton.errors import ConfigError, EngineUnavailableError, ProtocolError
from baton.wire import TokenId

MAX_BODY_BYTES = 32 * 2**20
_MAX_MESSAGE = 300
_TOKEN = "token_id:"
T = TypeVar("T")
NumDrafts = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class Model(msgspec.Struct, frozen=True):
    """One model of `/v1/models`."""

    id: str
    owned_by: str | None = None


class SpecDecode(msgspec.Struct, frozen=True):
    """Baton's own account of an answer's verification rounds."""

    accepted: list[NumDrafts]
    num_speculative_tokens: NumDrafts


class Logprobs(msgspec.Struct, frozen=True):
    """Logprobs of a completion; with `return_tokens_as_token_ids` its tokens are named `token_id:N`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a completion."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    spec_decode: SpecDecode | None = None


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int


class Completion(msgspec.Struct, frozen=True):
    """Body of a completion."""

    choices: list[Choice]
    usage: Usage | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[Model]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[TokenId]


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


def base_url(url: str, field: str) -> str:
    """`http://host:port[/prefix]` without a closing `/v1`. Raises `ConfigError` naming `field`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(field, f"must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def printable(text: str) -> str:
    """`text` fit for one line of a terminal."""
    line = "".join(c if c.isprintable() else " " for c in text[: _MAX_MESSAGE + 1])
    return line if len(text) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]} ..."


class Client:
    """Requests to the server at one base URL; an async context manager.

    All methods raise `EngineUnavailableError` for no answer or an HTTP status other than 200 (redirects are not
    followed), and `ProtocolError` for an answer that is malformed or too large.
    """

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        # Compressed bodies would make the limit on their size meaningless.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s), headers=headers, auto_decompress=False
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def model(self) -> Model:
        """The first model that the server lists."""
        models = _decode(await self.fetch("GET", f"{self.url}/v1/models"), _Models).data
        if not models:
            raise ProtocolError("the server lists no model")
        return models[0]

    async def complete(self, body: dict[str, Any]) -> Completion:
        """Answer of `POST /v1/completions`, with one choice at least."""
        completion = _decode(await self.fetch("POST", f"{self.url}/v1/completions", body), Completion)
        if not completion.choices:
            raise ProtocolError("the answer has no choices")
        return completion

    async def tokenize(self, model: str, prompt: str) -> list[int]:
        """Answer of vLLM's `POST /tokenize`."""
        body = {"model": model, "prompt": prompt}
        return _decode(await self.fetch("POST", f"{self.url}/tokenize", body), _Tokens).tokens

    async def fetch(self, method: str, url: str, body: dict[str, Any] | None = None) -> bytes:
        """Body of the answer to one request."""
        try:
            async with self._session.request(method, url, json=body, allow_redirects=False) as response:
                if 300 <= response.status < 400:
                    raise EngineUnavailableError(f"{url}: HTTP {response.status}: redirects are not followed")
                content = await _read(response)
                if response.status != 200:
                    raise EngineUnavailableError(f"{url}: HTTP {response.status}: {_refusal(content)}")
                return content
        except asyncio.TimeoutError:
            raise EngineUnavailableError(f"{url}: no answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailableError(f"{url}: {printable(str(error) or type(error).__name__)}") from None


def tokens_of(choice: Choice) -> list[int]:
    """Token ids of an answer: its `token_ids`, else those that its logprobs name. Raises `ProtocolError`."""
    if choice.token_ids is not None:
        return choice.token_ids
    if choice.logprobs is not None:
        ids = [token_id(name) for name in choice.logprobs.tokens]
        if all(i is not None for i in ids):
            return [i for i in ids if i is not None]
    raise ProtocolError(
        "the server does not tell token ids: it knows neither return_token_ids (vLLM from 0.10, Baton) "
        "nor return_tokens_as_token_ids"
    )


def token_id(name: str) -> int | None:
    """N of `token_id:N`; None for a token that is named by its text."""
    digits = name.removeprefix(_TOKEN)
    return int(digits) if digits != name and digits.isascii() and digits.isdigit() and len(digits) < 10 else None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise ProtocolError(f"the answer is larger than {MAX_BODY_BYTES} bytes")
    return bytes(content)


def _decode(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the answer is malformed: {printable(str(error))}") from None


def _refusal(content: bytes) -> str:
    try:
        return printable(msgspec.json.decode(content, type=_Refusal).error.message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return printable(content[: 4 * _MAX_MESSAGE].decode(errors="replace"))

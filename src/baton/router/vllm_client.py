"""HTTP client of one vLLM server that runs `BatonConnector`: the same legs as `EngineClient`'s, over vLLM's own API.

A leg is a streamed `/v1/completions` of token ids, its ticket goes along as `kv_transfer_params`. Who an engine is, is
asked by a request of one token, once per life of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from baton.errors import EngineLostError, EngineUnavailableError, ProtocolError, RequestError
from baton.handoff.ticket import request_digest
from baton.router.client import EngineClient
from baton.router.timers import RouterTimers
from baton.wire import EngineInfo, EngineLoad, FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenLogprobs

Role = Literal["both", "prefill", "decode"]
_T = TypeVar("_T")
PARAM = "baton"
_MAX_BODY_BYTES = 2**20
_EVENT, _DONE = b"data: ", b"[DONE]"
# vLLM's are signed.
_SEED_BITS = 63
_TOKEN = "token_id:"


class _Identity(msgspec.Struct, frozen=True):
    engine_id: str
    incarnation: str
    control_address: str
    fingerprint: str
    truncate_prefill: bool
    roles: list[str]
    vocab_size: int
    eos_token_ids: list[int]
    num_speculative_tokens: int


class _Model(msgspec.Struct, frozen=True):
    id: str
    root: str
    max_model_len: int


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: dict[str, Any] | None = None


class VllmClient(EngineClient):
    """Talks to the vLLM server at one base URL. `role` is the one it is used in: a `kv_both` engine can have either."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> None:
        super().__init__(session, url, timers)
        self._role: Role = role
        self._model: _Model | None = None
        self._identity: _Identity | None = None

    async def info(self) -> EngineInfo:
        """See `EngineClient.info`. A server that was away is asked anew who it is."""
        try:
            await self._fetch("GET", "/health")
        except EngineUnavailableError:
            self._identity = None
            raise
        if self._identity is None or self._model is None:
            self._model = self._decode(await self._fetch("GET", "/v1/models"), _Models).data[0]
            probe = {
                "model": self._model.id,
                "prompt": [0],
                "max_tokens": 1,
                "kv_transfer_params": {PARAM: {"role": "identify"}},
            }
            answer = self._decode(await self._fetch("POST", "/v1/completions", probe), _Answer)
            try:
                self._identity = msgspec.convert((answer.kv_transfer_params or {}).get(PARAM), _Identity)
            except msgspec.ValidationError as error:
                raise ProtocolError(f"{self.url} does not run BatonConnector: {error}") from None
        model, identity = self._model, self._identity
        missing = {self._role} - set(identity.roles) if self._role != "both" else set()
        if missing:
            raise RequestError(f"{self.url} has roles {identity.roles}, not {self._role!r}", "role")
        return EngineInfo(
            engine_id=identity.engine_id,
            incarnation=identity.incarnation,
            role=self._role,
            model=model.id,
            model_path=model.root,
            max_model_len=model.max_model_len,
            vocab_size=identity.vocab_size,
            eos_token_ids=identity.eos_token_ids,
            control_address=identity.control_address,
            fingerprint=identity.fingerprint,
            num_speculative_tokens=identity.num_speculative_tokens,
            batch_invariant=False,
        )

    async def load(self) -> EngineLoad:
        """See `EngineClient.load`; from vLLM's metrics, as far as it has them."""
        text = (await self._fetch("GET", "/metrics")).decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name.startswith("vllm:"):
                found[name.partition("{")[0]] = float(value)
        return EngineLoad(
            num_running=int(found.get("vllm:num_requests_running", 0)),
            num_waiting=int(found.get("vllm:num_requests_waiting", 0)),
            num_handoffs=0,
            kv_usage=found.get("vllm:kv_cache_usage_perc", 0.0),
            num_referenced_pages=0,
            num_quarantined_pages=0,
            num_cached_pages=0,
        )

    def digest(self, request: GenerateRequest) -> bytes:
        """See `EngineClient.digest`: a vLLM engine knows of a ticket's request only the tokens that are handed over."""
        return request_digest(request.prompt_token_ids[:-1], SamplingParams())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `EngineClient.generate`. A prefill leg yields the first token, where it must be the decode engine's."""
        if self._model is None or self._identity is None:
            await self.info()
        assert self._model is not None
        assert self._identity is not None
        prefill = request.handoff is not None and request.handoff.role == "prefill"
        # A sampled token of a verification step is another draw than the same engine's ordinary one, whatever the seed.
        drawn = self._identity.num_speculative_tokens > 0 and request.sampling_params.temperature > 0
        truncate = prefill and self._identity.truncate_prefill
        known = len(request.prompt_token_ids)
        position = known - (known if request.num_prompt_tokens is None else request.num_prompt_tokens)
        body = completion_body(request, self._model.id, position, prefill, truncate)
        last = prefill and request.sampling_params.max_tokens - position > 1
        async for choice in self._stream(body):
            chunk = _chunk(request.request_id, choice, position)
            position += len(chunk.token_ids)
            if last and chunk.finish_reason == "length":
                # The leg ends after one token, the request does not.
                chunk = msgspec.structs.replace(chunk, finish_reason=None)
            if not (prefill and (truncate or drawn)):
                yield chunk

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[_Choice, None]:
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body, timeout=self._leg_timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise self._refused(response.status, await response.content.read(2**16))
                async for line in response.content:
                    data = line.rstrip().removeprefix(_EVENT)
                    if data == _DONE:
                        return
                    if not data:
                        continue
                    event = msgspec.json.decode(data, type=_Event)
                    if event.error is not None:
                        raise EngineUnavailableError(f"engine {self.url}: {event.error.get('message')}")
                    if event.choices:
                        yield event.choices[0]
                raise EngineLostError(f"engine {self.url} went away in mid-stream")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnavailableError(f"engine {self.url}: {error or type(error).__name__}") from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise EngineLostError(f"engine {self.url}: {error or type(error).__name__}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolError(f"engine {self.url} sent a malformed event: {error}") from None

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=self._ask_timeout, allow_redirects=False
            ) as response:
                content = await response.content.read(_MAX_BODY_BYTES)
                if response.status != 200:
                    raise EngineUnavailableError(f"engine {self.url}: HTTP {response.status} from {path}")
                return content
        except asyncio.TimeoutError:
            raise EngineLostError(f"engine {self.url} does not answer") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnavailableError(f"engine {self.url}: {error or type(error).__name__}") from None

    def _decode(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.url} is not a vLLM server: {error}") from None

    def _refused(self, status: int, body: bytes) -> RequestError | EngineUnavailableError:
        message = f"HTTP {status}"
        with contextlib.suppress(msgspec.DecodeError, KeyError):  # the status says enough
            message = msgspec.json.decode(body, type=dict[str, dict[str, Any]])["error"]["message"]
        if status == 400:
            return RequestError(str(message))
        return EngineUnavailableError(f"engine {self.url}: {message}")


def completion_body(
    request: GenerateRequest, model: str, num_sent: int, prefill: bool, truncate: bool
) -> dict[str, Any]:
    """A leg as vLLM's completion request. `num_sent` output tokens are in the prompt already; `truncate`: the engine
    is to compute all but the last token.
    """
    params = request.sampling_params
    tokens = request.prompt_token_ids[:-1] if truncate else request.prompt_token_ids
    left = params.max_tokens - num_sent
    body: dict[str, Any] = {
        "model": model,
        "prompt": tokens,
        "request_id": request.request_id,
        "max_tokens": 1 if prefill else left,
        "min_tokens": min(max(params.min_tokens - num_sent, 0), 1 if prefill else left),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "stream": True,
        "return_token_ids": True,
    }
    if params.seed is not None:
        # Samples of one prompt differ; both legs of a sample do not.
        body["seed"] = (params.seed + params.sample_index) % 2**_SEED_BITS
    if params.min_p:
        body["min_p"] = params.min_p
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if request.handoff is not None:
        body["kv_transfer_params"] = {PARAM: msgspec.to_builtins(request.handoff)}
    return body


def _chunk(request_id: str, choice: _Choice, position: int) -> TokenChunk:
    tokens = choice.token_ids or []
    logprobs = None
    if choice.logprobs is not None and tokens:
        own, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        logprobs = [TokenLogprobs(p if p is not None else 0.0, _top(t)) for p, t in zip(own, top, strict=True)]
    error = "engine_error: the engine ended the request" if choice.finish_reason == "error" else None
    return TokenChunk(
        request_id=request_id,
        token_ids=tokens,
        position=position if tokens else None,
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
        error=error,
        recoverable=error is not None,
    )


def _top(found: dict[str, float] | None) -> list[tuple[int, float]]:
    pairs = [(int(name.removeprefix(_TOKEN)), value) for name, value in (found or {}).items()]
    return sorted(pairs, key=lambda pair: -pair[1])

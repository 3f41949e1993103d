"""The HTTP client of a vLLM server: legs over its completions API, and messages to its connector."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from baton.comparison import token_identity
from baton.errors import BatonError, EngineLostError, EngineUnavailableError, IncompatiblePeerError, ProtocolError
from baton.event_loop import timeout as time_limit
from baton.openai.answers import Completion, Model, Models, decode_answer
from baton.openai.client import read_body, read_samples
from baton.openai.http.lines import LineReader
from baton.router.clients.engine_client import EngineClient, error_of_response, finish
from baton.router.clients.posts import LegResponse
from baton.router.clients.vllm_api import completion_body, render_bodies, rendered_defaults, to_chunk, with_metrics
from baton.router.clients.vllm_events import LegEvents, without_finish
from baton.router.leg_tasks import Chunks
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingDefaults
from baton.wire import EngineInfo, EngineLoad, GenerateRequest, TokenChunk

if TYPE_CHECKING:
    from baton.router.pooled_engine import PooledEngine

_MAX_BODY_BYTES = 16 * 2**20
# Lifetime of a clock reading: clocks drift by less than 0.1 s within it.
_CLOCK_S = 600.0
# No vLLM server restarts within this time.
_UNSEEN_S = 3.0
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)
_T = TypeVar("_T")


class VllmClient(EngineClient):
    """`identify` asks the connector for the identity, once per incarnation.

    A restarted server accepts legs meant for its predecessor. So a server not seen for `_UNSEEN_S` is first checked by
    the start time in its metrics, or else by its identity.
    """

    has_ranks = True

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        timers: RouterTimers,
        identify: Callable[[VllmClient, Model], Awaitable[EngineInfo]],
    ) -> None:
        super().__init__(session, url, timers)
        self._identify = identify
        self._tell_timeout = aiohttp.ClientTimeout(total=timers.tell, sock_connect=timers.connect)
        self._model: Model | None = None
        self.adapters: tuple[str, ...] = ()  # names of the model's LoRA adapters, as last listed
        self._info: EngineInfo | None = None
        self._read = 0.0
        self._seen = -math.inf  # when the process of `_info` last answered
        self._started: bytes | None = None  # its start time, from its metrics
        self._recognising = asyncio.Lock()  # one leg asks on behalf of all

    @property
    def root(self) -> str | None:
        """The checkpoint that the server last named."""
        return None if self._model is None else self._model.root

    @staticmethod
    def of(engine: PooledEngine) -> VllmClient:
        assert isinstance(engine.client, VllmClient)
        return engine.client

    async def info(self) -> EngineInfo:
        """Reads the clock every `_CLOCK_S`."""
        began = time.monotonic()
        try:
            await self._get("/health", _MAX_BODY_BYTES)
            info = await self._recognise(began, self._ask_timeout)
        except EngineUnavailableError:
            self._seen = -math.inf
            raise
        self._seen = began
        if time.monotonic() - self._read >= _CLOCK_S:
            with contextlib.suppress(BatonError):  # the server is busy; the next check asks again
                info = await self._ask_identity(self._ask_timeout)
        return msgspec.structs.replace(info, clock=info.clock + time.monotonic() - self._read)

    async def _recognise(self, now: float, timeout: aiohttp.ClientTimeout) -> EngineInfo:
        """The identity of the process that answers at `now` or later."""
        if (info := self._recent(now)) is not None:
            return info
        info = self._info
        if info is None or not await self._is_same(timeout):
            self._info = None
            info = await self._ask_identity(timeout)
        self._seen = now
        return info

    def _recent(self, now: float) -> EngineInfo | None:
        return self._info if now - self._seen < _UNSEEN_S else None

    async def _is_same(self, timeout: aiohttp.ClientTimeout) -> bool:
        return self._started is not None and self._started == await self._ask_start(timeout)

    async def _ask_start(self, timeout: aiohttp.ClientTimeout) -> bytes | None:
        try:
            match = _STARTED.search(await self._get("/metrics", _MAX_BODY_BYTES, timeout))
        except EngineLostError:
            raise
        except EngineUnavailableError:
            return None
        return None if match is None else match[1]

    async def _ask_identity(self, timeout: aiohttp.ClientTimeout) -> EngineInfo:
        started = await self._ask_start(timeout)
        listed = self._decode(await self._get("/v1/models", _MAX_BODY_BYTES), Models).data
        if not listed:
            raise ProtocolError(f"{self.url} lists no model")
        self._model = listed[0]
        self.adapters = tuple(model.id for model in listed[1:] if model.parent == listed[0].id)
        self._info = await self._identify(self, self._model)
        self._read, self._started = time.monotonic(), started
        return self._info

    async def load(self) -> EngineLoad:
        samples = await self.metrics()
        return EngineLoad(
            num_running=int(sum(samples.get("vllm:num_requests_running", ()))),
            num_waiting=int(sum(samples.get("vllm:num_requests_waiting", ()))),
            num_handoffs=0,
            kv_usage=max(samples.get("vllm:kv_cache_usage_perc", ()), default=0.0),
            num_referenced_pages=0,
            num_quarantined_pages=0,
            num_cached_pages=0,
            num_prefix_queries=int(sum(samples.get("vllm:prefix_cache_queries_total", ()))),
            num_prefix_hits=int(sum(samples.get("vllm:prefix_cache_hits_total", ()))),
        )

    async def metrics(self) -> dict[str, list[float]]:
        """Finite samples of vLLM's own metrics, one per label set."""
        by_name: dict[str, list[float]] = {}
        body = await self._get("/metrics", _MAX_BODY_BYTES)
        try:
            samples = read_samples(body.decode())
        except (UnicodeDecodeError, ProtocolError) as error:
            raise ProtocolError(f"{self.url} is not a vLLM server: {error}") from None
        for sample in samples:
            other = self.rank is not None and sample.labels.get("engine", str(self.rank)) != str(self.rank)
            if sample.name.startswith("vllm:") and math.isfinite(sample.value) and not other:
                by_name.setdefault(sample.name, []).append(sample.value)
        return by_name

    async def send_params(self, kv_transfer_params: dict[str, object], adapter: str | None = None) -> Completion:
        """Send a completion request of one token to the model or an adapter. It is greedy: on CPUs vLLM 0.32 computes
        wrong tokens for greedy requests that are verified beside one with a temperature.

        Raises `EngineUnavailableError`, `ProtocolError`.
        """
        if self._model is None:
            await self.info()
        assert self._model is not None
        model = adapter or self._model.id
        body = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = kv_transfer_params
        with self._converting:
            async with time_limit(self._tell_timeout.total), self._completion(body) as response:
                return self._decode(await read_body(response.content, _MAX_BODY_BYTES), Completion)

    async def sampling_defaults(self) -> SamplingDefaults | None:
        """Read from `/v1/completions/render`. None without that route: vLLM 0.32 has it only with `--enable-scale-out`.

        Raises `EngineUnavailableError`.
        """
        assert self._model is not None
        assert self._model.max_model_len is not None
        length = self._model.max_model_len
        left, asked = [await self._render(body) for body in render_bodies(self._model.id, length)]
        try:
            return rendered_defaults(left, asked, length)
        except (msgspec.MsgspecError, IndexError):
            return None

    async def _render(self, body: dict[str, Any]) -> bytes:
        """The answer may have any status."""
        with self._converting:
            async with self._session.post(
                self._base + "/v1/completions/render",
                json=body,
                headers=self._headers,
                timeout=self._ask_timeout,
                allow_redirects=False,
            ) as response:
                answer = await read_body(response.content, _MAX_BODY_BYTES)
                if response.status in (429, 503):
                    raise error_of_response(self.url, response.status, answer)
                return answer

    def generate(self, request: GenerateRequest) -> Chunks:
        return self.leg(request)

    async def leg(
        self,
        request: GenerateRequest,
        kv_transfer_params: dict[str, object] | None = None,
        first_only: bool = False,
        is_padded: bool = False,
    ) -> Chunks:
        """`first_only`: one token. A chunk that ends the request waits for the event with the metrics, which vLLM sends
        at once. A first token does not wait: its metrics follow in a chunk without tokens. `is_padded`: see
        `with_metrics`.

        Raises the errors of `EngineClient.generate`, and `HandoffError` if a healthy server ended it.
        """
        name = await self._served(request)
        more = first_only and request.sampling_params.max_tokens - request.num_known > 1
        body = completion_body(request, name, request.num_known, kv_transfer_params, first_only, stream=True)
        events = LegEvents(request, f"engine {self.url}", more, is_padded)
        async with self._completion(body) as response:
            reader = LineReader(response.content, _MAX_BODY_BYTES)
            while not events.done and (lines := await reader.next()):
                for line in lines:
                    if (chunk := events.read(line)) is not None and (take := (yield chunk)) is not None:
                        reader.take = functools.partial(events.take, take)
            if events.done:
                await finish(reader)
            last = events.last
            if last is not None and (last.finish_reason is not None or last.timings is not None):
                yield last
            if events.done or last is not None:
                return
        raise EngineLostError(f"engine {self.url} went away in mid-stream")

    async def first_token(
        self, request: GenerateRequest, kv_transfer_params: dict[str, object]
    ) -> tuple[TokenChunk, dict[str, Any]]:
        """The first token, and the response's `kv_transfer_params`, which vLLM does not stream.

        Raises the errors of `leg`.
        """
        name = await self._served(request)
        position = request.num_known
        body = completion_body(request, name, position, kv_transfer_params, first_only=True, stream=False)
        async with self._completion(body) as response:
            answer = self._decode(await read_body(response.content, _MAX_BODY_BYTES), Completion)
        if not answer.choices:
            raise ProtocolError(f"engine {self.url} sent no choice")
        with self._converting:
            chunk = with_metrics(request, to_chunk(request, answer.choices[0], position), answer.metrics)
        more = request.sampling_params.max_tokens - position > 1
        return without_finish(chunk) if more else chunk, answer.kv_transfer_params or {}

    async def _served(self, request: GenerateRequest) -> str:
        """The name of the request's model or adapter. Raises the errors of `info`, and `IncompatiblePeerError`."""
        info = self._recent(time.monotonic())
        if info is None:
            async with self._recognising:
                info = await self._recognise(time.monotonic(), self._tell_timeout)
        own = token_identity(info.fingerprint)
        if request.identity not in (None, own):
            raise IncompatiblePeerError({"identity": (own, request.identity)})
        assert self._model is not None
        if request.adapter is None:
            return self._model.id
        named = next((name for name, adapter in info.adapters.items() if adapter == request.adapter), None)
        if named is None:
            raise IncompatiblePeerError({"adapter": (sorted(info.adapters.values()), request.adapter)})
        return named

    def _completion(self, body: dict[str, Any]) -> AbstractAsyncContextManager[LegResponse]:
        # A line may be as long as a body: the first event repeats the prompt.
        return self._answer("/v1/completions", [msgspec.json.encode(body)], _MAX_BODY_BYTES)

    def _decode(self, body: bytes, kind: type[_T]) -> _T:
        return decode_answer(body, kind, f"{self.url} is not a vLLM server")

"""The HTTP client of an SGLang server with Baton's plug-in, over SGLang's own API."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from baton.errors import REASONS, EngineLostError, HandoffError, ProtocolError, RequestError
from baton.openai.answers import decode_answer, refusal_in
from baton.openai.http.lines import LineReader
from baton.router.clients.engine_client import EngineClient, finish
from baton.router.leg_tasks import Chunks
from baton.router.timers import RouterTimers
from baton.sampling_params import SamplingParams, TokenId, signed_word
from baton.wire import (
    EngineIdentity,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    LegTimings,
    Role,
    SglangIdentity,
    TokenChunk,
    TokenLogprobs,
    encoded_once,
)

if TYPE_CHECKING:
    from baton.router.pooled_engine import PooledEngine

_MAX_BODY_BYTES = 16 * 2**20
_EVENT, _DONE = b"data:", b"[DONE]"
# A reason in the plug-in's text: before a colon or at the end.
_NAMED = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b(?=:|$)")
RANK_FIELD = "routed_dp_rank"


class _State(msgspec.Struct):
    baton: SglangIdentity | None = None


class _ServerInfo(msgspec.Struct):
    model_path: str
    served_model_name: str | None = None
    internal_states: list[_State] = []


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_Load] = []


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    matched: Any = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, TokenId, Any]] | None = None
    output_top_logprobs: list[list[tuple[float, TokenId, Any]] | None] | None = None
    # With `--enable-metrics`: seconds, and seconds since 1970.
    queue_time: float | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None


class _Event(msgspec.Struct):
    """`output_ids`: all so far, or only new ones, depending on the server's flags."""

    output_ids: list[TokenId] = []
    meta_info: _Meta | None = None
    error: dict[str, Any] | None = None


class SglangClient(EngineClient):
    """`role`: as the operator registered the server; `info` refuses another."""

    has_ranks = True

    def __init__(self, session: aiohttp.ClientSession, url: str, timers: RouterTimers, role: Role) -> None:
        super().__init__(session, url, timers)
        self._role = role

    @staticmethod
    def of(engine: PooledEngine) -> SglangClient:
        assert isinstance(engine.client, SglangClient)
        return engine.client

    async def info(self) -> EngineInfo:
        """Asks the server each time, since it may have restarted."""
        began = time.monotonic()
        info = decode_answer(
            await self._get("/server_info", _MAX_BODY_BYTES), _ServerInfo, f"{self.url} is not an SGLang server"
        )
        identity = chosen(
            [state.baton for state in info.internal_states if state.baton is not None], self.url, self.rank
        )
        if self._role != identity.role:
            raise RequestError(f"{self.url} has role {identity.role!r}, not {self._role!r}", "role")
        own = {name: getattr(identity, name) for name in EngineIdentity.__struct_fields__}
        return EngineInfo(
            **own | {"clock": identity.clock + time.monotonic() - began},
            role=self._role,
            model=info.served_model_name or info.model_path,
            model_path=info.model_path,
            max_model_len=identity.max_model_len,
            batch_invariant=False,
        )

    async def load(self) -> EngineLoad:
        body = await self._get("/v1/loads", _MAX_BODY_BYTES)
        loads = decode_answer(body, _Loads, f"{self.url} is not an SGLang server").loads
        return EngineLoad(
            num_running=sum(load.num_running_reqs for load in loads),
            num_waiting=sum(load.num_waiting_reqs for load in loads),
            num_handoffs=0,
            kv_usage=max((load.token_usage for load in loads), default=0.0),
            num_referenced_pages=0,
            num_quarantined_pages=0,
            num_cached_pages=0,
        )

    def generate(self, request: GenerateRequest) -> Chunks:
        """Without a ticket, which the plug-in refuses."""
        return self.leg(request, {})

    async def leg(self, request: GenerateRequest, handoff: Mapping[str, Any], first_only: bool = False) -> Chunks:
        """`handoff`: fields of the body. `first_only`: one token.

        Raises the errors of `EngineClient.generate`, and `HandoffError` if a healthy server ended it.
        """
        params, sent = request.sampling_params, 0
        left = params.max_tokens - request.num_known
        rank = {} if self.rank is None else {RANK_FIELD: self.rank}
        body = msgspec.json.encode({**generate_body(request, left), **rank, **handoff})
        async with self._answer("/generate", [body], _MAX_BODY_BYTES) as response:
            reader = LineReader(response.content, _MAX_BODY_BYTES)
            while lines := await reader.next():
                for line in lines:
                    data = line.strip().removeprefix(_EVENT).lstrip()
                    if data == _DONE:
                        await finish(reader)
                        return
                    if not data:
                        continue
                    event = decode_answer(data, _Event, f"{self.url} is not an SGLang server")
                    chunk = to_token_chunk(request, event, sent)
                    sent += len(chunk.token_ids)
                    if first_only and left > 1 and chunk.finish_reason == "length":
                        chunk = msgspec.structs.replace(chunk, finish_reason=None)
                    if chunk.finish_reason is not None:
                        await finish(reader)
                        yield chunk
                        return
                    yield chunk
        raise EngineLostError(f"engine {self.url} went away in mid-stream")


def chosen(found: Sequence[SglangIdentity], url: str, rank: int | None) -> SglangIdentity:
    """Raises `ProtocolError` for a server without the plug-in, `RequestError` for another rank."""
    if not found:
        raise ProtocolError(f"{url} does not run SGLang with --disaggregation-transfer-backend baton")
    for identity in found:
        if identity.data_parallel_rank == rank:
            return identity
    problem = "has data-parallel ranks: name each, as URL#dp_rank=0" if rank is None else "has no such rank"
    raise RequestError(f"{url} {problem}", "url")


def generate_body(request: GenerateRequest, left: int) -> dict[str, Any]:
    """`left`: the most tokens to generate."""
    params = request.sampling_params
    sampling: dict[str, Any] = {
        "max_new_tokens": left,
        "min_new_tokens": min(max(params.min_tokens - request.num_known, 0), left),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
    }
    if params.seed is not None:
        sampling["sampling_seed"] = signed_word(params.seed + params.sample_index)
    if params.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    body: dict[str, Any] = {
        "input_ids": encoded_once(request.prompt_token_ids),
        "sampling_params": sampling,
        "stream": True,
    }
    if params.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
    if request.cache_salt is not None:
        body["extra_key"] = request.cache_salt
    return body


def to_token_chunk(request: GenerateRequest, event: _Event, num_sent: int) -> TokenChunk:
    """Convert an event that follows `num_sent` tokens of its leg. Raises `RequestError`, `HandoffError` if the server
    ended the request, `ProtocolError` for an event that is no continuation.
    """
    if event.error is not None:
        failure = _failure(str(event.error.get("message")))
        refusal = None if num_sent or failure.reason != "engine_error" else refusal_in(event.error)
        raise refusal or failure
    meta = event.meta_info or _Meta()
    finish = meta.finish_reason
    if finish is not None and finish.type == "abort":
        raise _failure(finish.message or "the server gave the request up")
    new = meta.completion_tokens - num_sent
    if not 0 <= new <= len(event.output_ids):
        raise ProtocolError(f"an event with {len(event.output_ids)} tokens does not follow {num_sent}")
    tokens = event.output_ids[len(event.output_ids) - new :]
    matched = finish.matched if finish is not None else None
    return TokenChunk(
        request_id=request.request_id,
        token_ids=tokens,
        position=request.num_known + num_sent if tokens else None,
        logprobs=_logprobs(request.sampling_params, meta, new) if tokens else None,
        finish_reason=None if finish is None else "length" if finish.type == "length" else "stop",
        stop_reason=matched if isinstance(matched, int) and matched in request.sampling_params.stop_token_ids else None,
        num_cached_tokens=meta.cached_tokens,
        timings=_timings(meta) if request.timings and finish is not None else None,
    )


def _timings(meta: _Meta) -> LegTimings | None:
    """None if the server does not report times."""
    if meta.queue_time is None or meta.forward_entry_time is None or meta.prefill_finished_time is None:
        return None
    return LegTimings(
        started=meta.queue_time, sampled=meta.queue_time + meta.prefill_finished_time - meta.forward_entry_time
    )


def _failure(message: str) -> HandoffError:
    """The plug-in puts Baton's reason into SGLang's text."""
    named = (word for word in _NAMED.findall(message) if word in REASONS)
    return HandoffError(next(named, "engine_error"), message)


def _logprobs(params: SamplingParams, meta: _Meta, new: int) -> list[TokenLogprobs] | None:
    if params.logprobs is None or meta.output_token_logprobs is None:
        return None
    own = meta.output_token_logprobs[-new:]
    top = (meta.output_top_logprobs or [None] * new)[-new:]
    if len(own) != new or len(top) != new:
        raise ProtocolError("logprobs of other tokens than those sent")
    return [
        TokenLogprobs(logprob or 0.0, [(token, value) for value, token, _ in best or ()][: params.logprobs])
        for (logprob, _, _), best in zip(own, top, strict=True)
    ]

"""Requests and responses between router and engines, in token ids: only the API layer detokenises."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from baton.errors import RequestError
from baton.sampling_params import NO_DEFAULTS, SamplingDefaults, SamplingParams, TokenId

MAX_CACHE_SALT_CHARS = 1024
MAX_WAITED_S = 1e6
MAX_ADAPTER_CHARS = 1024
# The objective of requests without one: others overtake them for this long only.
UNHURRIED_S = 60.0
MAX_TICKET_CHARS = 24 * 1024  # holds the control addresses of all ranks
# Exact in any JSON reader.
WholeNumber = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
NumDrafts = Annotated[int, msgspec.Meta(ge=0, le=1024)]
EngineId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
MAX_PRIORITY = 1 << 31
Priority = Annotated[int, msgspec.Meta(gt=-MAX_PRIORITY, lt=MAX_PRIORITY)]
TicketText = Annotated[str, msgspec.Meta(max_length=MAX_TICKET_CHARS)]
FinishReason = Literal["stop", "length", "abort", "error"]
Role = Literal["both", "prefill", "decode"]  # of an engine
LegRole = Literal["prefill", "decode"]
Mode = Literal["push", "pull"]  # P writes, or D reads
Integrity = Literal["off", "sampled", "full"]  # how much of the KV has digests
KVStream = Literal["off", "chunk", "layer"]  # P copies after the prefill, after each chunk, or after some layers
Recovery = Literal["none", "retry", "source", "recompute", "full"]
RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)


def check_salt(salt: object) -> str | None:
    if salt is None or (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS):
        return salt
    raise RequestError(f"cache_salt must be 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt")


def allows_recovery(recovery: Recovery, rung: Recovery) -> bool:
    return RECOVERIES.index(recovery) >= RECOVERIES.index(rung)


class PromptIds(list[int]):
    """A prompt whose JSON is encoded once for all legs, so it must not change after `json`."""

    __slots__ = ("_json",)

    def json(self) -> bytes:
        if not hasattr(self, "_json"):
            self._json: bytes = msgspec.json.encode(self)
        return self._json


def encoded_once(prompt: list[int]) -> list[int] | msgspec.Raw:
    return msgspec.Raw(prompt.json()) if isinstance(prompt, PromptIds) else prompt


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Marks a leg of a handoff, or a request that an engine of a deployment computes `alone`. For `alone` the `ticket`
    names the engine as both P and D.

    `prefix_len`: only cached KV moves (docs/protocol.md, "Prefixes"), from the engine with role `prefill` to that with
    role `decode`. The first sends at most this many tokens of the prompt, and reports with its first chunk how many it
    holds; the second takes so many. Less than the prompt's length. None: a leg of a request.

    `window_start`: for the second, the first chunk's `window_start`. `prefix_multiple`: for the first: the prefix ends
    at a multiple of it.
    """

    role: Literal["prefill", "decode", "alone"]
    ticket: TicketText
    prefix_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    window_start: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample of one prompt: the body of `POST /inference/v1/generate`.

    - `num_prompt_tokens`: the length of the client's prompt. A resumed request's `prompt_token_ids` is longer: it ends
      with output tokens that the client has, which must not shift penalties, limits and positions.
    - `cache_salt`: KV is only shared between requests with the same salt.
    - `max_prefill_tokens`: an engine that lacks KV of more tokens declines as `prefix_missing`.
    - `timings`: the engine sends `LegTimings` with its first tokens.
    - `waited_s`: seconds since the request began, if earlier attempts failed: it keeps its place in the queue.
    - `priority`: lower runs first, as in vLLM. `ttft_slo_s`: how soon the first token should come.
    - `identity`: an engine with another `comparison.token_identity` refuses the request.
    - `adapter`: NAME@DIGEST of a LoRA adapter, of `EngineInfo.adapters`. Baton's engines have none.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    num_prompt_tokens: int | None = None
    handoff: HandoffParams | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    max_prefill_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    waited_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAITED_S)] = 0.0
    priority: Priority = 0
    ttft_slo_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_WAITED_S)] | None = None
    identity: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER_CHARS)] | None = None
    timings: bool = False

    @property
    def num_known(self) -> int:
        return 0 if self.num_prompt_tokens is None else len(self.prompt_token_ids) - self.num_prompt_tokens


class TokenLogprobs(msgspec.Struct, frozen=True):
    """`top`: the most likely tokens, best first. `rank`: set for prompt tokens; 1 is the most likely."""

    logprob: float
    top: list[tuple[TokenId, float]] = []
    rank: int = 0


class LegTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times of an engine's work for a leg, in seconds after the leg's arrival, and the handoff's size.

    - `started`: its first forward began. `sampled`: the first token came from it. `chunks`: of each forward over the
      prompt, its beginning and how many tokens it computed.
    - The others: events of a decode leg's handoff (docs/traces.md).
    """

    started: float | None = None
    sampled: float | None = None
    announced: float | None = None
    admitted: float | None = None
    registered: float | None = None
    first_bytes: float | None = None
    last_bytes: float | None = None
    committed: float | None = None
    num_bytes: int = 0
    num_runs: int = 0
    integrity: str = ""
    chunks: list[tuple[float, int]] = []


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step's output for one request. The last chunk has `finish_reason`.

    - `position`: the output index of the first of `token_ids`; 0: the first token after the client's prompt.
    - `prompt_logprobs`: per prompt token, None for the first. Sent once, with the first token or the end.
    - `accepted`, `drafted`: accepted and proposed drafts of each verification that ended in this chunk.
    - `queued_s`: how long the prompt waited. Sent once, with the first token; with a `prefix_len`, once the prefix is
      there: how long steps of other requests delayed it.
    - `num_cached_tokens`: prompt tokens found in the prefix cache; with a `prefix_len`, those that are there.
    - `window_start`: of a prefix's source: the first entry that it has of its windows.
    - `timings`: if requested; once, with the first tokens of a leg.
    - `handoff_error`: `"<reason>: <message>"` of a failed handoff; once, with the tokens computed instead.
    - `error`: `"<reason>: <message>"`, only with `finish_reason == "error"`. `recoverable`: another engine may
      continue.
    """

    request_id: str
    token_ids: list[TokenId] = []
    position: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    accepted: list[NumDrafts] = []
    drafted: list[NumDrafts] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: WholeNumber = 0
    window_start: WholeNumber = 0
    queued_s: float | None = None
    timings: LegTimings | None = None
    handoff_error: str | None = None
    error: str | None = None
    recoverable: bool = False

    def only_adds_tokens(self) -> bool:
        if self.finish_reason is not None or self.queued_s is not None or self.handoff_error is not None:
            return False
        return self.logprobs is None and self.prompt_logprobs is None


class EngineIdentity(msgspec.Struct, frozen=True):
    """How routers, tickets and peers identify an engine.

    - `incarnation`: new with each start.
    - `control_addresses`: one per rank; empty if the engine takes no handoffs.
    - `fingerprint`: JSON of the facts that must be equal on P and D.
    - `clock`: its monotonic clock, in seconds: tickets expire by it.
    - `data_parallel_rank`: its rank among the engines started together, or in a server of vLLM or SGLang.
    - `sampling_defaults`: for parameters that the client leaves out, applied by the API layer.
    - `kv_transport`: the `transports.registry.transport_name`; empty: unknown, or no handoffs.
    - `protocol`: the version of its handoff protocol; 0: unknown.
    """

    engine_id: EngineId
    incarnation: str
    control_addresses: list[str]
    fingerprint: str
    vocab_size: WholeNumber
    eos_token_ids: list[int]
    num_speculative_tokens: NumDrafts
    clock: float = 0.0
    data_parallel_rank: int | None = None
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    kv_transport: str = ""
    protocol: WholeNumber = 0


def differ_in_protocol(one: EngineIdentity, other: EngineIdentity) -> bool:
    return 0 not in (one.protocol, other.protocol) and one.protocol != other.protocol


class EngineInfo(EngineIdentity, frozen=True, kw_only=True):
    """`GET /inference/v1/info`: what a router needs to sign tickets and check requests.

    - `kv_tokens`: the tokens that its pages hold.
    - `prefix_step`: prefix hits come in multiples of this many tokens; 0: none. A decode engine's are those on prompts
      that were handed to it, other engines' those on prompts that they computed.
    - `prefix_multiple`: prefixes that come from another engine must end at multiples of this many tokens.
    - `max_num_seqs`: 0 if unknown.
    - `default_seed`: None: each request without a seed gets a random one.
    - `kv_events_port`, `kv_events_replay_port`: where it publishes KV events, at the host of its URL; 0: nowhere.
    - `token_api`: whether it serves `POST /inference/v1/generate`.
    - `adapters`: its LoRA adapters that can be handed off, by name, as NAME@DIGEST.
    """

    role: Role
    model: str
    model_path: str
    max_model_len: WholeNumber
    kv_tokens: WholeNumber = 0
    prefix_step: WholeNumber = 0
    prefix_multiple: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)] = 1
    max_num_seqs: WholeNumber = 0
    batch_invariant: bool
    default_seed: int | None = None
    token_api: bool = True
    kv_events_port: int = 0
    kv_events_replay_port: int = 0
    adapters: dict[str, str] = {}


# Baton's fields in `kv_transfer_params` of vLLM requests and responses.
BATON_PARAM = "baton"


class LegParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`kv_transfer_params["baton"]` of a request to a vLLM server with `BatonConnector`.

    `identify`: asks for the server's `VllmIdentity`. `cancel`: nobody will fetch the prefill leg's KV.
    `seed_first_token`: P hands over the whole prompt, and the decode leg's prompt ends with the token that P sampled.
    `prefix`: a leg of a hand-back. P gives it up if its prefix cache lacks more of the prompt than two blocks; D's
    response contains a `VllmPrefix`. `num_tokens`: those handed back, 0: all but the last. `whole_blocks`: D
    gets all of a window's first block, which lies within one of P's.
    """

    role: Literal["prefill", "decode", "identify", "cancel"]
    ticket: str = ""
    seed_first_token: bool = False
    prefix: bool = False
    num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    whole_blocks: bool = False


class VllmPrefix(msgspec.Struct, frozen=True):
    """`kv_transfer_params["baton"]` of the response to a decode leg of a hand-back. `num_tokens`: tokens of the prompt
    that the server did not have to compute."""

    num_tokens: int


class VllmIdentity(EngineIdentity, frozen=True, kw_only=True):
    """A vLLM server with `BatonConnector`.

    `truncate_prefill`: its prefill legs must come without the tokens that are not handed over. `prefill_multiple`: a
    handoff moves a multiple of this many tokens. `tile`: tokens that its kernels store as one opaque piece, equal on
    all peers; 0: unknown. `adapter`: NAME@DIGEST of the LoRA adapter that the request named as its model, and that its
    tickets' digest contains; empty: none, or one that cannot be handed off. `moves_prefixes`: it has a prefix cache
    whose KV can be handed back. `prefix_multiple`, `prefix_extra`: tokens handed back to it are a multiple, and its
    leg computes so many more, or it would not find windows again.
    """

    truncate_prefill: bool
    roles: list[str]
    prefill_multiple: int = 1
    tile: int = 0
    adapter: str = ""
    moves_prefixes: bool = False
    prefix_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1
    prefix_extra: Annotated[int, msgspec.Meta(ge=0)] = 0

    def handed_over(self, num_tokens: int) -> int:
        """With a multiple, at least two of a prompt's tokens are left: vLLM would compute one as a verification."""
        multiple = self.prefill_multiple
        return num_tokens - 1 if multiple == 1 else max(num_tokens - 2, 0) // multiple * multiple


class SglangIdentity(EngineIdentity, frozen=True, kw_only=True):
    """An SGLang server with the transfer backend `baton`, or one of its data-parallel ranks:
    `internal_states[i]["baton"]` of `GET /server_info`. `role`: prefill or decode."""

    role: str
    max_model_len: int


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /inference/v1/load`. `num_prefix_queries`, `num_prefix_hits`: prompt tokens looked up and found in its
    prefix cache since it started, or 0."""

    num_running: WholeNumber
    num_waiting: WholeNumber
    num_handoffs: WholeNumber
    kv_usage: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    num_referenced_pages: WholeNumber
    num_quarantined_pages: WholeNumber
    num_cached_pages: WholeNumber
    num_prefix_queries: WholeNumber = 0
    num_prefix_hits: WholeNumber = 0

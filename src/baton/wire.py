"""Requests and responses between router and engines. They carry token ids: only the API layer detokenises."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from baton.errors import RequestError
from baton.sampling_params import NO_DEFAULTS, SamplingDefaults, SamplingParams, TokenId

MAX_CACHE_SALT_CHARS = 1024
MAX_WAITED_S = 1e6
MAX_ADAPTER_CHARS = 1024
# A request without an objective for its first token stands as one with this: others overtake it for a while only.
UNHURRIED_S = 60.0
MAX_TICKET_CHARS = 24 * 1024  # holds the control addresses of all ranks
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
    """Raises `RequestError` unless `salt` is a valid `cache_salt`."""
    if salt is None or (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS):
        return salt
    raise RequestError(f"cache_salt must be 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt")


def allows_recovery(recovery: Recovery, rung: Recovery) -> bool:
    """Whether `--recovery` allows `rung`: each value allows itself and all earlier ones of `RECOVERIES`."""
    return RECOVERIES.index(recovery) >= RECOVERIES.index(rung)


class PromptIds(list[int]):
    """One prompt. The JSON is encoded once for all legs, so the list must not change after `json`."""

    __slots__ = ("_json",)

    def json(self) -> bytes:
        if not hasattr(self, "_json"):
            self._json: bytes = msgspec.json.encode(self)
        return self._json


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Marks a request as a leg of a handoff, or as one that an engine of a deployment computes `alone`. The router
    signs `ticket` (`baton.handoff.protocol.ticket`); for `alone` it names the engine as both P and D.

    `prefix_len`: only cached KV moves, from the engine with role `prefill` into the prefix cache of the one with role
    `decode`, and nothing is computed. The first sends at most this many tokens of the prompt, and says with its first
    chunk how many it holds; the second takes so many. Less than the prompt's length. None: a leg of a request.
    """

    role: Literal["prefill", "decode", "alone"]
    ticket: TicketText
    prefix_len: Annotated[int, msgspec.Meta(ge=1)] | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample of one prompt, in token ids: the JSON body of `POST /inference/v1/generate`.

    - `num_prompt_tokens`: the length of the client's prompt. A resumed request's `prompt_token_ids` is longer: it ends
      with output tokens that the client has, which must not shift penalties, limits and positions.
    - `cache_salt`: KV of equal prefixes is only shared between requests with the same salt.
    - `max_prefill_tokens`: an engine that lacks the KV of more tokens declines the request as `prefix_missing`. None:
      it computes them.
    - `timings`: the engine sends `LegTimings` with its first tokens.
    - `waited_s`: seconds since the request began, if earlier attempts failed. It keeps its place among an engine's
      waiting requests.
    - `priority`: lower runs first, as in vLLM. `ttft_slo_s`: how soon the first token should come; of equal priority,
      the request whose first token is due earlier runs first. None: not soon.
    - `identity`: an engine with another `comparison.token_identity` refuses the request. None: any engine takes it.
    - `adapter`: NAME@DIGEST of the LoRA adapter that computes it, of `EngineInfo.adapters`. Baton's engines have none.
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
    """The logprob of one token, and those of the most likely tokens, best first. `rank` is set for prompt tokens: 1 is
    the most likely; 0: not given."""

    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class LegTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When an engine did what for a leg, in seconds after the leg's arrival; None: it did not. With the size of the
    handoff.

    - `started`: its first forward began. `sampled`: the first token came from it. `chunks`: of each forward over the
      prompt, its beginning and how many tokens it computed.
    - Decode legs: `announced` to P, `admitted` by P, `registered` (D gave P its pages), `first_bytes` and `last_bytes`
      (the first and last copy ended), `committed`.
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
    """One engine step's output for one request. The last chunk of a stream has `finish_reason` set.

    - `position`: the output index of the first of `token_ids`; 0: the first token after the client's prompt.
    - `prompt_logprobs`: per prompt token, None for the first. Sent once, with the first token or the end.
    - `accepted`, `drafted`: accepted and proposed drafts of each verification that ended in this chunk.
    - `queued_s`: how long the prompt waited until an engine began it. Sent once, with the first token.
    - `num_cached_tokens`: prompt tokens that were found in the prefix cache; with a `prefix_len`, those that are there.
    - `timings`: only if the request asks for them. Sent once, with the first tokens of a leg.
    - `error`: `"<reason>: <message>"`, only with `finish_reason == "error"`. `recoverable`: another engine may be able
      to continue.
    """

    request_id: str
    token_ids: list[TokenId] = []
    position: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    accepted: list[int] = []
    drafted: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    queued_s: float | None = None
    timings: LegTimings | None = None
    error: str | None = None
    recoverable: bool = False


class EngineIdentity(msgspec.Struct, frozen=True):
    """How routers, tickets and peers identify an engine.

    - `incarnation`: new with each start of its process.
    - `control_addresses`: one per rank; empty if the engine takes no handoffs.
    - `fingerprint`: JSON of the facts that must be equal on P and D.
    - `clock`: its monotonic clock in seconds when it answered. Tickets expire by this clock.
    - `data_parallel_rank`: its rank among the engines started together, or in a server of vLLM or SGLang.
    - `sampling_defaults`: for parameters that the client leaves out, applied by the API layer.
    - `kv_transport`: the `transports.registry.transport_name` of what moves its KV; empty: it does not tell, or hands
      nothing off.
    """

    engine_id: str
    incarnation: str
    control_addresses: list[str]
    fingerprint: str
    vocab_size: int
    eos_token_ids: list[int]
    num_speculative_tokens: int
    clock: float = 0.0
    data_parallel_rank: int | None = None
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    kv_transport: str = ""


class EngineInfo(EngineIdentity, frozen=True, kw_only=True):
    """`GET /inference/v1/info`: what a router needs to sign tickets and check requests.

    - `kv_tokens`: the number of tokens that its pages hold.
    - `prefix_step`: prefix hits come in multiples of this many tokens; 0: none. A decode engine's are those on prompts
      that were handed to it, other engines' those on prompts that they computed.
    - `max_num_seqs`: the number of requests computed at once; 0: unknown.
    - `default_seed`: for requests without a seed. None: each gets a random one.
    - `kv_events_port`, `kv_events_replay_port`: where it publishes its KV events, at the host of its URL; 0: nowhere.
    - `token_api`: whether it serves `POST /inference/v1/generate`.
    - `adapters`: its LoRA adapters that can be handed off, by name, as NAME@DIGEST.
    """

    role: Role
    model: str
    model_path: str
    max_model_len: int
    kv_tokens: int = 0
    prefix_step: int = 0
    max_num_seqs: int = 0
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

    `identify`: the response carries the server's `VllmIdentity`. `cancel`: nobody will fetch the KV of the ticket's
    prefill leg. `seed_first_token`: P hands over the whole prompt, and the decode leg's prompt ends with the token
    that P sampled.
    """

    role: Literal["prefill", "decode", "identify", "cancel"]
    ticket: str = ""
    seed_first_token: bool = False


class VllmIdentity(EngineIdentity, frozen=True, kw_only=True):
    """A vLLM server with `BatonConnector`. `roles`: the legs that it takes. `truncate_prefill`: its prefill legs must
    come without the tokens that are not handed over. `prefill_multiple`: a handoff moves a multiple of so many.
    `tile`: tokens that its kernels store as one opaque piece, which must be as many on a peer; 0: it does not tell.
    `adapter`: NAME@DIGEST of the LoRA adapter that the asking request named as its model, and that its legs' tickets
    contain in their digest; empty: none, or one that cannot be handed off."""

    truncate_prefill: bool
    roles: list[str]
    prefill_multiple: int = 1
    tile: int = 0
    adapter: str = ""

    def handed_over(self, num_tokens: int) -> int:
        """Of a prompt. With a multiple, at least two are left: vLLM would compute one as a verification."""
        multiple = self.prefill_multiple
        return num_tokens - 1 if multiple == 1 else max(num_tokens - 2, 0) // multiple * multiple


class SglangIdentity(EngineIdentity, frozen=True, kw_only=True):
    """An SGLang server with the transfer backend `baton`, or one of its data-parallel ranks, under
    `internal_states[i]["baton"]` of its `GET /server_info`. `role`: prefill or decode."""

    role: str
    max_model_len: int


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /inference/v1/load`: a snapshot of an engine's load and handoffs. `num_prefix_queries`, `num_prefix_hits`:
    prompt tokens looked up and found in its prefix cache since it started; 0 if it does not tell."""

    num_running: int
    num_waiting: int
    num_handoffs: int
    kv_usage: float
    num_referenced_pages: int
    num_quarantined_pages: int
    num_cached_pages: int
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0

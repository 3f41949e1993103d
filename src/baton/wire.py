"""Types of requests and responses between router and engines. They carry token ids: only the front door detokenises."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, get_args

import msgspec

from baton.errors import RequestError

MAX_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_SAMPLES = 64
MAX_TOKEN_ID = 2**31 - 1
# Seeds and sample indices are 64-bit words of the noise key.
MAX_WORD = 2**64 - 1
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 1024
# Each entry costs work in every step.
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MIN_TEMPERATURE = 0.01
MAX_GRAMMAR_CHARS = 64 * 1024
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
MAX_CACHE_SALT_CHARS = 1024
MAX_TICKET_CHARS = 24 * 1024  # holds the control addresses of all ranks
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
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
    """Return `salt` if it is a valid `cache_salt`, else raise `RequestError`."""
    if salt is None or (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS):
        return salt
    raise RequestError(f"cache_salt must be 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt")


def recovers(recovery: Recovery, rung: Recovery) -> bool:
    """Whether `--recovery` allows `rung`. Each value allows itself and all earlier ones of `RECOVERIES`."""
    return RECOVERIES.index(recovery) >= RECOVERIES.index(rung)


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A constraint on the output, with vLLM's names: the text of a JSON schema, a regular expression, a list of
    choices, or a grammar (Lark or GBNF). Exactly one is set.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def check(self) -> None:
        """Raise `RequestError` for invalid parameters. Only an engine can tell whether a grammar compiles."""
        given = [text for text in (self.json, self.regex, self.grammar) if text is not None]
        if len(given) + (self.choice is not None) != 1:
            raise RequestError("needs exactly one of json, regex, choice, grammar", "structured_outputs")
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise RequestError("choice must hold texts that are not empty", "structured_outputs")
        if self.disable_any_whitespace and self.json is None:
            raise RequestError("disable_any_whitespace is for json alone", "structured_outputs")
        if sum(len(text) for text in (*given, *(self.choice or ()))) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"a grammar must be at most {MAX_GRAMMAR_CHARS} characters", "structured_outputs")


def seed_word(seed: int | None) -> int | None:
    """A client's seed as a 64-bit word (two's complement); None without a seed or, as in vLLM, for -1."""
    if seed is None or seed == -1:
        return None
    return seed + MAX_WORD + 1 if -(2**63) <= seed < 0 else seed


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. Names and meanings are those of vLLM and the OpenAI API.

    `check` enforces all bounds: parameters that pass cannot make an engine fail.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    sample_index: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def check(self, vocab_size: int | None = None) -> SamplingParams:
        """Return self if every value is in range, else raise `RequestError` with the parameter's name."""

        def need(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{param} must be {rule}, got {reprlib.repr(getattr(self, param))}", param)

        def within(param: str, low: float, high: float) -> None:
            # NaN fails this comparison.
            need(low <= getattr(self, param) <= high, param, f"between {low:g} and {high:g}")

        last_token = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
        # A request for prompt logprobs needs no output tokens.
        least = 1 if self.prompt_logprobs is None else 0
        need(least <= self.max_tokens <= MAX_TOKEN_ID, "max_tokens", f"between {least} and {MAX_TOKEN_ID}")
        need(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        within("n", 1, MAX_SAMPLES)
        within("temperature", 0.0, 100.0)
        need(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        need(-1 <= self.top_k <= MAX_TOKEN_ID, "top_k", f"-1, 0 (all) or at most {MAX_TOKEN_ID}")
        within("min_p", 0.0, 1.0)
        within("presence_penalty", -2.0, 2.0)
        within("frequency_penalty", -2.0, 2.0)
        within("repetition_penalty", 0.01, 100.0)
        need(self.seed is None or -(2**63) <= self.seed <= MAX_WORD, "seed", "between -2**63 and 2**64 - 1")
        need(0 <= self.sample_index <= MAX_WORD, "sample_index", "between 0 and 2**64 - 1")
        need(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"0 to {MAX_LOGPROBS}")
        in_range = self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS
        need(in_range, "prompt_logprobs", f"0 to {MAX_LOGPROBS}")
        need(
            len(self.stop) <= MAX_STOP_STRINGS and all(0 < len(s) <= MAX_STOP_CHARS for s in self.stop),
            "stop",
            f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters",
        )
        need(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS and all(0 <= i <= last_token for i in self.stop_token_ids),
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} token ids between 0 and {last_token}",
        )
        need(
            len(self.bad_words) <= MAX_BAD_WORDS and all(0 < len(w) <= MAX_BAD_WORD_CHARS for w in self.bad_words),
            "bad_words",
            f"at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_CHARS} characters",
        )
        if self.structured_outputs is not None:
            self.structured_outputs.check()
            need(
                not self.ignore_eos, "ignore_eos", "false where the output follows a grammar, which says where it ends"
            )
        if self.allowed_token_ids is not None:
            known = all(0 <= token <= last_token for token in self.allowed_token_ids)
            need(
                known and 0 < len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS,
                "allowed_token_ids",
                f"1 to {MAX_ALLOWED_TOKEN_IDS} token ids between 0 and {last_token}",
            )
        if self.logit_bias is not None:
            in_range = all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values())
            need(
                len(self.logit_bias) <= MAX_LOGIT_BIASES and in_range,
                "logit_bias",
                f"at most {MAX_LOGIT_BIASES} values in [-100, 100]",
            )
            known = all(0 <= token <= last_token for token in self.logit_bias)
            need(known, "logit_bias", f"of token ids between 0 and {last_token}")
        return self

    def normalised(self) -> SamplingParams:
        """Raise a temperature between 0 and `MIN_TEMPERATURE` to that, as in vLLM: less could overflow scores."""
        if not 0.0 < self.temperature < MIN_TEMPERATURE:
            return self
        return msgspec.structs.replace(self, temperature=MIN_TEMPERATURE)


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server's defaults for sampling parameters that a request leaves out; None: the default of `SamplingParams`.
    `limit` is the maximum of `max_tokens`; None: as many as fit the context.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    limit: int | None = None

    def given(self) -> dict[str, Any]:
        """The defaults that are set, by parameter name, without `max_tokens` and `limit`."""
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None and name not in ("max_tokens", "limit")
        }

    def describe(self) -> str:
        """The defaults that are set, as readable text."""
        found = msgspec.structs.asdict(self).items()
        return ", ".join(f"{name} {value:g}" for name, value in found if value is not None)


NO_DEFAULTS = SamplingDefaults()


class PromptIds(list[int]):
    """The ids of one prompt. Their JSON is encoded once for all legs, so the list must not change after `json`."""

    __slots__ = ("_json",)

    def json(self) -> bytes:
        if not hasattr(self, "_json"):
            self._json: bytes = msgspec.json.encode(self)
        return self._json


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Marks a request as a leg of a handoff, or as one that an engine of a deployment computes `alone`. The router
    signs `ticket` (`baton.handoff.protocol.ticket`); for `alone` it names the engine as both P and D.
    """

    role: Literal["prefill", "decode", "alone"]
    ticket: TicketText


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample of one prompt, in token ids: the JSON body of `POST /inference/v1/generate`.

    - `num_prompt_tokens`: the length of the client's prompt. A resumed request's `prompt_token_ids` is longer: it ends
      with output tokens that the client has, which must not shift penalties, limits and positions.
    - `cache_salt`: KV of equal prefixes is only shared between requests with the same salt.
    - `max_prefill_tokens`: an engine that lacks the KV of more tokens declines the request as `prefix_missing`. None:
      it computes them.
    - `identity`: an engine with another `comparison.token_identity` refuses the request. None: any engine takes it.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    num_prompt_tokens: int | None = None
    handoff: HandoffParams | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    max_prefill_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    identity: Annotated[str, msgspec.Meta(max_length=64)] | None = None

    @property
    def num_known(self) -> int:
        """The number of output tokens that the request begins with."""
        return 0 if self.num_prompt_tokens is None else len(self.prompt_token_ids) - self.num_prompt_tokens


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The logprob of one token, and those of the most likely tokens, best first. `rank` is set for prompt tokens: 1 is
    the most likely; 0: not given.
    """

    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step's output for one request. The last chunk of a stream has `finish_reason` set.

    - `position`: the output index of the first of `token_ids`; 0: the first token after the client's prompt.
    - `prompt_logprobs`: per prompt token, None for the first. Sent once, with the first token or the end.
    - `accepted`, `drafted`: accepted and proposed drafts of each verification that ended in this chunk.
    - `queued_s`: how long the prompt waited until an engine began it. Sent once, with the first token.
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
    error: str | None = None
    recoverable: bool = False


class EngineIdentity(msgspec.Struct, frozen=True):
    """How routers, tickets and peers identify an engine.

    - `incarnation`: new with each start of its process.
    - `control_addresses`: one per rank; empty if the engine takes no handoffs.
    - `fingerprint`: JSON of the facts that must be equal on P and D.
    - `clock`: its monotonic clock in seconds when it answered. Tickets expire by this clock.
    - `data_parallel_rank`: its rank among the engines started together, or in a vLLM server.
    - `sampling_defaults`: for parameters that the client leaves out, applied by the front door.
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
    - `prefix_step`: prefix hits on prompts that were handed to it come in multiples of this many tokens; 0: none.
    - `max_num_seqs`: the number of requests computed at once; 0: unknown.
    - `default_seed`: for requests without a seed. None: each gets a random one.
    - `token_api`: whether it serves `POST /inference/v1/generate`.
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


# The key of Baton's fields in `kv_transfer_params` of vLLM requests and responses.
BATON_PARAM = "baton"


class LegParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`kv_transfer_params["baton"]` of a request to a vLLM server with `BatonConnector`.

    `identify`: the response carries the server's `VllmIdentity`. `cancel`: nobody will fetch the KV of the ticket's
    prefill leg. `seed_first_token`: P hands over the whole prompt, and the decode leg's prompt ends with the token that
    P sampled.
    """

    role: Literal["prefill", "decode", "identify", "cancel"]
    ticket: str = ""
    seed_first_token: bool = False


class VllmIdentity(EngineIdentity, frozen=True, kw_only=True):
    """The identity of a vLLM server with `BatonConnector`. `roles`: the legs that it takes. `truncate_prefill`: its
    prefill legs must come without the prompt's last token.
    """

    truncate_prefill: bool
    roles: list[str]


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /inference/v1/load`: a snapshot of an engine's load and handoffs."""

    num_running: int
    num_waiting: int
    num_handoffs: int
    kv_usage: float
    num_referenced_pages: int
    num_quarantined_pages: int
    num_cached_pages: int

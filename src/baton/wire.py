"""Types that cross the HTTP boundary between router and engines. Everything here is plain data.

The legs between router and engines carry token ids, never text: only the front door detokenises.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, get_args

import msgspec

from baton.errors import RequestError

MAX_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_SAMPLES = 64
MAX_TOKEN_ID = 2**31 - 1
# A request's seed and sample index are the 64-bit words of the noise's key.
MAX_WORD = 2**64 - 1
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 1024
# Each entry costs work in every step of the request.
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MIN_TEMPERATURE = 0.01
MAX_GRAMMAR_CHARS = 64 * 1024
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
MAX_CACHE_SALT_CHARS = 1024
MAX_TICKET_CHARS = 24 * 1024  # control addresses of all ranks are in it
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TicketText = Annotated[str, msgspec.Meta(max_length=MAX_TICKET_CHARS)]
FinishReason = Literal["stop", "length", "abort", "error"]
Role = Literal["both", "prefill", "decode"]  # of an engine
LegRole = Literal["prefill", "decode"]  # of one leg of a handoff
Mode = Literal["push", "pull"]  # who issues the copies: P, or D
Integrity = Literal["off", "sampled", "full"]  # how much of the KV is digested
KVStream = Literal["off", "chunk", "layer"]  # when P copies: after the prefill, each chunk of it, or a chunk's layers
Recovery = Literal["none", "retry", "source", "recompute", "full"]
RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)


def check_salt(salt: object) -> str | None:
    """`salt` when it can be a `cache_salt`. Raises `RequestError`."""
    if salt is None or (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS):
        return salt
    raise RequestError(f"cache_salt must be 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt")


def recovers(recovery: Recovery, rung: Recovery) -> bool:
    """Whether `--recovery` allows a rung of the ladder: each value allows the rungs up to its own."""
    return RECOVERIES.index(recovery) >= RECOVERIES.index(rung)


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What the output must be, vLLM's names: JSON of a schema (its text), a match of a regular expression, one of the
    texts, or a text of a grammar (Lark or GBNF). Exactly one of the four.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def check(self) -> None:
        """Raise `RequestError` for what no grammar can be made of; whether it can be compiled is an engine's to say."""
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
    """A client's seed as a word of the noise's key: as in vLLM, -1 asks for a new one, and others may be negative."""
    if seed is None or seed == -1:
        return None
    return seed + MAX_WORD + 1 if -(2**63) <= seed < 0 else seed


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. Names and meanings are those of vLLM and the OpenAI API.

    `check` holds every bound there is: what passes it cannot make an engine fail. Raises `RequestError` naming the
    parameter that is out of range.
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
        """Return self when every value is in range, else raise `RequestError` naming the parameter."""

        def need(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{param} must be {rule}, got {reprlib.repr(getattr(self, param))}", param)

        def within(param: str, low: float, high: float) -> None:
            # NaN is in no range.
            need(low <= getattr(self, param) <= high, param, f"between {low:g} and {high:g}")

        last_token = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
        # Without tokens there is something to say of the prompt alone.
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
        """Return what is sampled with: a temperature below `MIN_TEMPERATURE` that is not 0 counts as that, as in vLLM,
        because scores divided by less may overflow."""
        if not 0.0 < self.temperature < MIN_TEMPERATURE:
            return self
        return msgspec.structs.replace(self, temperature=MIN_TEMPERATURE)


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a server samples with where a request does not say: fields of `SamplingParams`, None for that type's own
    default. `limit`: the most tokens of any request; None: as many as the context holds."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    limit: int | None = None

    def given(self) -> dict[str, Any]:
        """The defaults that there are, by the names of sampling parameters, but for `max_tokens`."""
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None and name not in ("max_tokens", "limit")
        }

    def told(self) -> str:
        """All that there is, for people to read; empty where there is nothing."""
        found = msgspec.structs.asdict(self).items()
        return ", ".join(f"{name} {value:g}" for name, value in found if value is not None)


NO_DEFAULTS = SamplingDefaults()


class PromptIds(list[int]):
    """The ids of one prompt. Their JSON is made once for all legs; the list must not change after `json`."""

    __slots__ = ("_json",)

    def json(self) -> bytes:
        """The ids as a JSON array."""
        if not hasattr(self, "_json"):
            self._json: bytes = msgspec.json.encode(self)
        return self._json


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a request one leg of a handoff, or one that an engine of a deployment computes `alone`. `ticket` is
    signed by the router (`baton.handoff.protocol.ticket`); of a request alone it names the engine on both sides."""

    role: Literal["prefill", "decode", "alone"]
    ticket: TicketText


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample of one prompt, in token ids. `POST /inference/v1/generate` takes it as JSON.

    `num_prompt_tokens` counts the client's prompt: on a resumed request (`prompt_token_ids` ends with tokens
    already sent) it is smaller than the list, so that penalties, limits and positions do not shift. Requests share KV
    of equal prefixes only with those of the same `cache_salt`. An engine that lacks the KV of more than
    `max_prefill_tokens` of its tokens declines it as `prefix_missing`; None: it computes them. An engine with another
    `identity` (`comparison.token_identity`) than the request's refuses it; None: any engine takes it.
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
        """How many output tokens the request begins with."""
        return 0 if self.num_prompt_tokens is None else len(self.prompt_token_ids) - self.num_prompt_tokens


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Logprob of one token, with the most likely alternatives, best first. `rank` of a prompt's token: 1 is the
    likeliest; 0 where it is not told."""

    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step adds to one request. The stream ends with the chunk that has `finish_reason` set.

    `position` is the output index of the first of `token_ids` (0: the first token after the client's prompt); None
    without tokens. `prompt_logprobs`: of each token of the prompt but the first, which has none; once, with the first
    token or the end. `accepted` holds, per verification round that ended in this chunk, how many draft tokens were
    accepted, `drafted` of how many. `queued_s`: how long the prompt waited for an engine to begin it; once, with the
    first token. `error` is set only with `finish_reason == "error"` and is
    `"<reason>: <message>"`; `recoverable` says that the request may succeed elsewhere, from the tokens known so far.
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
    """Who an engine is to routers, tickets and peers. `incarnation` is new with each start of its process;
    `control_addresses`: one for each of its ranks, none where it takes no handoffs; `fingerprint`: JSON of the facts
    that must be equal on P and D; `clock`: what its monotonic clock said, in seconds, as it answered: tickets expire
    by it. `data_parallel_rank`: which it is of the engines that were started together, or of a vLLM server's.
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


class EngineInfo(EngineIdentity, frozen=True, kw_only=True):
    """`GET /inference/v1/info`: what a router needs to know of an engine to mint tickets and check requests.

    `default_seed`: the seed of requests that bring none; None draws one for each. `sampling_defaults`: what the front
    door fills in where a client says nothing. `token_api`: whether it serves
    `POST /inference/v1/generate`. `kv_tokens`: how many its pages hold at once. `prefix_step`: a prompt that was handed
    to it is found again in multiples of so many tokens; 0: not at all. `max_num_seqs`: how many requests it computes at
    once; 0: it does not tell.
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
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    token_api: bool = True


# The key of Baton's own fields in the `kv_transfer_params` of vLLM requests and responses.
BATON_PARAM = "baton"


class LegParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`kv_transfer_params["baton"]` of a request to a vLLM server with `BatonConnector`.

    `identify` asks who the server is: `VllmIdentity` comes with the response. `cancel` says that nobody will fetch
    what the ticket's prefill leg holds. `seed_first_token`: the prefill leg hands over its whole prompt, and the decode
    leg's prompt has one token more, which the prefill leg sampled.
    """

    role: Literal["prefill", "decode", "identify", "cancel"]
    ticket: str = ""
    seed_first_token: bool = False


class VllmIdentity(EngineIdentity, frozen=True, kw_only=True):
    """Who a vLLM server with `BatonConnector` is. `roles`: the legs that it takes; `truncate_prefill`: those of prefill
    come without their prompt's last token.
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

"""Sampling parameters, with the names and meanings of vLLM and the OpenAI API."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Annotated, Any

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


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A constraint on the output, with vLLM's names. `json`: a schema's text. `grammar`: Lark or GBNF. Exactly one is
    set."""

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def check(self) -> None:
        """Raises `RequestError`. Only an engine can tell whether a grammar compiles."""
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
    """The seed as a 64-bit word (two's complement); None without a seed or, as in vLLM, for -1."""
    if seed is None or seed == -1:
        return None
    return seed + MAX_WORD + 1 if -(2**63) <= seed < 0 else seed


def signed_word(seed: int) -> int:
    """Signed, as in vLLM and SGLang."""
    word = seed % (MAX_WORD + 1)
    return word - MAX_WORD - 1 if word > MAX_WORD // 2 else word


_RANGES = {
    "n": (1, MAX_SAMPLES),
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`check` enforces all bounds: parameters that pass cannot make an engine fail."""

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
        """Returns self. Raises `RequestError` naming the parameter."""
        self._check_numbers()
        self._check_texts()
        self._check_tokens(MAX_TOKEN_ID if vocab_size is None else vocab_size - 1)
        return self

    def _need(self, ok: bool, param: str, rule: str) -> None:
        if not ok:
            raise self._refusal(param, rule)

    def _refusal(self, param: str, rule: str) -> RequestError:
        return RequestError(f"{param} must be {rule}, got {reprlib.repr(getattr(self, param))}", param)

    def _check_numbers(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        if not least <= self.max_tokens <= MAX_TOKEN_ID:
            raise self._refusal("max_tokens", f"between {least} and {MAX_TOKEN_ID}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise self._refusal("min_tokens", "between 0 and max_tokens")
        for param, (low, high) in _RANGES.items():
            # NaN fails the comparison.
            if not low <= getattr(self, param) <= high:
                raise self._refusal(param, f"between {low:g} and {high:g}")
        if not 0.0 < self.top_p <= 1.0:
            raise self._refusal("top_p", "in (0, 1]")
        if not -1 <= self.top_k <= MAX_TOKEN_ID:
            raise self._refusal("top_k", f"-1, 0 (all) or at most {MAX_TOKEN_ID}")
        if self.seed is not None and not -(2**63) <= self.seed <= MAX_WORD:
            raise self._refusal("seed", "between -2**63 and 2**64 - 1")
        if not 0 <= self.sample_index <= MAX_WORD:
            raise self._refusal("sample_index", "between 0 and 2**64 - 1")
        for param, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise self._refusal(param, f"0 to {MAX_LOGPROBS}")

    def _check_texts(self) -> None:
        for param, most, most_chars in (
            ("stop", MAX_STOP_STRINGS, MAX_STOP_CHARS),
            ("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
        ):
            if not (texts := getattr(self, param)):
                continue
            fit = len(texts) <= most and all(0 < len(text) <= most_chars for text in texts)
            self._need(fit, param, f"at most {most} strings of 1 to {most_chars} characters")
        if self.structured_outputs is not None:
            self.structured_outputs.check()
            what = "false where the output follows a grammar, which says where it ends"
            self._need(not self.ignore_eos, "ignore_eos", what)

    def _check_tokens(self, last_token: int) -> None:
        if not self.stop_token_ids and self.allowed_token_ids is None and self.logit_bias is None:
            return

        def known(tokens: Iterable[int]) -> bool:
            return all(0 <= token <= last_token for token in tokens)

        need, ids = self._need, f"token ids between 0 and {last_token}"
        fit = len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS and known(self.stop_token_ids)
        need(fit, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} {ids}")
        if self.allowed_token_ids is not None:
            fit = 0 < len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS and known(self.allowed_token_ids)
            need(fit, "allowed_token_ids", f"1 to {MAX_ALLOWED_TOKEN_IDS} {ids}")
        if self.logit_bias is not None:
            in_range = all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values())
            fit = len(self.logit_bias) <= MAX_LOGIT_BIASES and in_range
            need(fit, "logit_bias", f"at most {MAX_LOGIT_BIASES} values in [-100, 100]")
            need(known(self.logit_bias), "logit_bias", f"of {ids}")

    def normalised(self) -> SamplingParams:
        """Raise a temperature below `MIN_TEMPERATURE` to that, as in vLLM: less could overflow scores."""
        if not 0.0 < self.temperature < MIN_TEMPERATURE:
            return self
        return msgspec.structs.replace(self, temperature=MIN_TEMPERATURE)


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server's defaults; None: that of `SamplingParams`. `limit`: the maximum of `max_tokens`; None: as many as fit
    the context."""

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
        if self == NO_DEFAULTS:
            return {}
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None and name not in ("max_tokens", "limit")
        }

    def describe(self) -> str:
        fields = msgspec.structs.asdict(self).items()
        return ", ".join(f"{name} {value:g}" for name, value in fields if value is not None)


NO_DEFAULTS = SamplingDefaults()

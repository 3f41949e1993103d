"""The seam between the OpenAI API and the source of tokens: one engine, or a router over several."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.comparison import token_identity
from baton.text import Tokenizer
from baton.wire import NO_DEFAULTS, EngineInfo, GenerateRequest, Mode, SamplingDefaults, SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a backend, as far as the API needs it. Lengths are in tokens. `default_seed`: that of requests
    without one, None for a new one each. `identity`: the `comparison.token_identity` of the engines that may serve
    requests which were prepared with this model's tokenizer and limits; None for any. `root`: its directory. `created`:
    when it was first served here, in seconds since 1970. `defaults`: what requests are sampled with that do not say."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int
    default_seed: int | None = None
    identity: str | None = None
    root: str | None = None
    created: int = 0
    defaults: SamplingDefaults = NO_DEFAULTS

    @classmethod
    def of(cls, info: EngineInfo, tokenizer: Tokenizer) -> ServedModel:
        """The model of an engine."""
        length, drafts = info.max_model_len, info.num_speculative_tokens
        identity, now = token_identity(info.fingerprint), int(time.time())
        own = info.default_seed, identity, info.model_path, now, info.sampling_defaults
        return cls(info.model, tokenizer, length, info.vocab_size, drafts, *own)


Went = Callable[[str, Sequence[str]], None]


class Backend(Protocol):
    """Makes tokens for requests. All calls come from one event loop."""

    @property
    def allows_kv_mode(self) -> bool:
        """Whether a request may choose how its KV moves."""
        ...

    def model(self) -> ServedModel:
        """Return the model. Raises `EngineUnavailableError` while there is none."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError` for parameters that this backend cannot honour. `params` are the client's own: seed
        None where it gave none, `n` samples."""
        ...

    def generate(
        self, request: GenerateRequest, kv_mode: Mode | None = None, went: Went | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the request's tokens; closing the generator aborts the request. `went` is told why it runs where it
        does, in a word, and on which engines.

        The last chunk has `finish_reason`. Raises `RequestError` or `EngineUnavailableError` from the first
        step when the request is refused.
        """
        ...

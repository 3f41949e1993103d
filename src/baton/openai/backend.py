"""The interface between the OpenAI API and the source of tokens: one engine, or a router over several."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.comparison import token_identity
from baton.sampling_params import NO_DEFAULTS, SamplingDefaults, SamplingParams
from baton.text import Tokenizer
from baton.wire import EngineInfo, GenerateRequest, Mode, TokenChunk


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Lengths are in tokens.

    - `identity`: engines need this `comparison.token_identity` to serve requests that were prepared with this model's
      tokenizer and limits; None: any may.
    - `root`: the checkpoint directory. `created`: when it was first served here, in seconds since 1970.
    - `adapters`: LoRA adapters that clients may name as their model, as NAME@DIGEST. `adapter`: the named one.
    """

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
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter: str | None = None

    @classmethod
    def of(cls, info: EngineInfo, tokenizer: Tokenizer) -> ServedModel:
        length, drafts = info.max_model_len, info.num_speculative_tokens
        identity, now = token_identity(info.fingerprint), int(time.time())
        own = info.default_seed, identity, info.model_path, now, info.sampling_defaults
        return cls(info.model, tokenizer, length, info.vocab_size, drafts, *own)


OnRoute = Callable[[str, Sequence[str]], None]
# Returns whether a chunk was passed on.
Take = Callable[[TokenChunk], bool]


class Backend(Protocol):
    """All calls come from one event loop."""

    @property
    def allows_kv_mode(self) -> bool:
        """Whether requests may choose push or pull."""
        ...

    def model(self) -> ServedModel:
        """Raises `EngineUnavailableError` without a model."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raises `RequestError` for unsupported parameters. They are the client's: any `n`, and a seed only if
        given."""
        ...

    def generate(
        self,
        request: GenerateRequest,
        kv_mode: Mode | None = None,
        on_route: OnRoute | None = None,
        take: Take | None = None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Closing the generator aborts the request. `on_route` is called with the reason for the route, one word, and
        its engines. While the next chunk is awaited, those of which `only_adds_tokens` holds may go to `take`.

        The first step raises `RequestError` or `EngineUnavailableError` if the request is refused.
        """
        ...

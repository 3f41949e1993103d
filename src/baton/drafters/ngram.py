"""Prompt lookup (Saxena, 2023; vLLM's `ngram`): proposes what followed an earlier occurrence of the last tokens.

It takes the longest n-gram of `prompt_lookup_min` to `prompt_lookup_max` tokens at the end of a request's tokens that
also occurs earlier, and its first occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from baton.drafters.base import DraftBatch
from baton.drafters.chain import IntArray
from baton.errors import ConfigError
from baton.models.base import CausalLM
from baton.models.layer_cache import LayerSpec
from baton.models.layers.linear import Build

# vLLM's default if neither length is given.
_LENGTH = 5


class NGram:
    kv_layers: Sequence[LayerSpec] = ()
    kv_modules: Sequence[int | None] = ()
    aux_layers: tuple[int, ...] = ()
    needs_contexts = True

    def __init__(self, least: int, most: int) -> None:
        self._min_n, self._max_n = least, most

    @classmethod
    def load(
        cls,
        path: str,
        target: CausalLM,
        build: Build,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
    ) -> NGram:
        """A missing length equals the other. Raises `ConfigError`."""
        most = prompt_lookup_max or prompt_lookup_min or _LENGTH
        least = prompt_lookup_min or most
        if least > most:
            raise ConfigError("speculative_config.prompt_lookup_min", f"is {least}, prompt_lookup_max is {most}")
        return cls(least, most)

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> None:
        return None

    def extend(self, batch: DraftBatch) -> None:
        return None

    def draft(self, batch: DraftBatch, extended: None) -> list[list[int]]:
        return [
            _follow(context, self._min_n, self._max_n)[:num].tolist()
            for context, num in zip(batch.contexts, batch.num_drafts.tolist(), strict=True)
        ]


def _follow(tokens: IntArray, least: int, most: int) -> IntArray:
    """Empty if the n-gram occurs nowhere else."""
    ends = np.arange(len(tokens) - 1)  # possible ends of an occurrence: before the last token
    found, length = ends, 0
    for back in range(min(most, len(tokens) - 1)):
        ends = ends[ends >= back]
        ends = ends[tokens[ends - back] == tokens[-1 - back]]
        if not len(ends):
            break
        found, length = ends, back + 1
    return tokens[found[0] + 1 :] if least <= length else tokens[:0]

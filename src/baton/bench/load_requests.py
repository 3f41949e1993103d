"""Random prompts and arrival times for a load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """vLLM's dataset `random`: a shared prefix, then each prompt's own tokens.

    Lengths of own tokens and outputs are uniform in [length * (1 - range_ratio), length * (1 + range_ratio)].
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def check(self) -> None:
        """Raises `ConfigError` naming the flag."""
        _at_least("random_input_len", self.input_len, 1)
        _at_least("random_output_len", self.output_len, 1)
        _at_least("random_prefix_len", self.prefix_len, 0)
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError("random_range_ratio", f"must be at least 0 and below 1, got {self.range_ratio}")

    def make(self, count: int, vocabulary: Sequence[int], random: np.random.Generator) -> list[LoadRequest]:
        prefix = _tokens(vocabulary, self.prefix_len, random)
        return [
            LoadRequest(
                prefix + _tokens(vocabulary, self._length(self.input_len, random), random),
                self._length(self.output_len, random),
            )
            for _ in range(count)
        ]

    def _length(self, mean: int, random: np.random.Generator) -> int:
        low, high = math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))
        return max(1, int(random.integers(low, high, endpoint=True)))


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """vLLM's dataset `prefix_repetition`: one of `num_prefixes` prefixes, and an own suffix."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def check(self) -> None:
        """Raises `ConfigError` naming the flag."""
        for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len"):
            _at_least(f"prefix_repetition_{name}", getattr(self, name), 1)

    def make(self, count: int, vocabulary: Sequence[int], random: np.random.Generator) -> list[LoadRequest]:
        """Prompts in random order: count // num_prefixes per prefix, or one more."""
        prefixes = [_tokens(vocabulary, self.prefix_len, random) for _ in range(self.num_prefixes)]
        chosen = random.permutation([index % self.num_prefixes for index in range(count)])
        return [
            LoadRequest(prefixes[index] + _tokens(vocabulary, self.suffix_len, random), self.output_len)
            for index in chosen
        ]


def arrival_times(count: int, rate: float, burstiness: float, random: np.random.Generator) -> list[float]:
    """Seconds from the load's start.

    Gaps have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, infinity is even. As
    in vLLM they are scaled so that the last request arrives at exactly count / rate. Raises `ConfigError` if
    `burstiness` leaves no gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else random.gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    if not times[-1] > 0.0:
        raise ConfigError("burstiness", f"{burstiness} leaves no gap between any two of {count} requests")
    return [float(time) for time in times * (count / rate / times[-1])]


def _tokens(vocabulary: Sequence[int], count: int, random: np.random.Generator) -> tuple[int, ...]:
    return tuple(vocabulary[index] for index in random.integers(0, len(vocabulary), count))


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(field, f"must be at least {least}, got {value}")

"""The requests for each pair of target and drafter: prompts, page sizes, and prefix hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baton.sampling_params import SamplingParams
from testkit.engines import Mode

MODES: tuple[Mode, Mode] = ("push", "pull")
# Tokens per page on P and on D. With `PER_GROUP` every group has its own.
SIZES: dict[str, tuple[str, str]] = {"16/16": ("16", "16"), "16/7": ("16", "7"), "8/24": ("8", "24")}
PER_GROUP = "per group"
_PER_GROUP = (16, 8, 5, 12), (7, 12, 16, 3)
ALL_SIZES = (*SIZES, PER_GROUP)
# Every residue of every page size; a single token; shorter than k, a window of 9 and a convolution of 4; multiples of
# all sizes but the odd one, and of that one.
LENGTHS = (*range(1, 26), 35, 48, 63, 112)
MAX_MODEL_LEN = 192
# Prompts are computed in chunks of this many rows, which end anywhere in a page.
CHUNK = 17
NUM_TOKENS = 10
_FILLER = 25  # enough tokens to fill the page around a hit, whatever its size
_TEMPERATURES = (0.0, 4.0, 8.0)
_ALPHABET = 6

HANDED_BACK = "handed back"
CONDITIONS = {
    "whole": "P computes a prompt in one step",
    "chunked": f"P computes prompts in pieces, all prompts in steps of {CHUNK} rows",
    "hit on P": "P holds a part of the prompt",
    "hit on D": "D holds a part of the prompt, or all of it",
    "hits on both": "P and D hold parts of different lengths",
    "preempted": "D takes a request's pages while it decodes, and computes it again",
    "resumed": "the legs begin with tokens that the client has already, as after a failover",
    HANDED_BACK: "D holds a part of the prompt, and P gets it from there before it computes the rest",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request of `length` prompt tokens. `number` is unique among all cases: no two share a prompt."""

    condition: str
    mode: Mode
    length: int
    number: int
    seed: int

    @property
    def chunked(self) -> bool:
        return self.condition == "chunked"

    @property
    def name(self) -> str:
        return f"{self.condition}, {self.mode}, {self.length} tokens (case {self.number})"

    @property
    def prompt(self) -> list[int]:
        """A unique first token, then few different ones, so that text repeats."""
        rng = np.random.default_rng([self.seed, self.number])
        alphabet = rng.integers(2, 250, _ALPHABET)
        return [2 + self.number % 248, *rng.choice(alphabet, self.length - 1).tolist()]

    @property
    def params(self) -> SamplingParams:
        """Greedy, or with noise that target and drafter share, so that a random drafter is right at times."""
        n = self.number
        return SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=_TEMPERATURES[n % len(_TEMPERATURES)],
            seed=n,
            frequency_penalty=0.5 if n % 5 == 0 else 0.0,
            logprobs=1 if n % 4 == 0 else None,
            ignore_eos=True,
        )

    def begins_alike(self, engine: str) -> list[int] | None:
        """A prompt that P or D gets first, so that it holds a part of this one."""
        if self.condition not in (f"hit on {engine}", "hits on both") and (self.condition, engine) != (
            HANDED_BACK,
            "D",
        ):
            return None
        n, prompt = self.length, self.prompt
        parts = (n, n - 1, (n + 1) // 2, max(1, n - 16))
        held = parts[(self.number + (engine == "D")) % len(parts)]
        other = 255 if held == n else (prompt[held] + 1) % 250
        return prompt[:held] + [other] * _FILLER

    def preempted_at(self, num_output: int) -> bool:
        """Whether D preempts a request that has this many output tokens."""
        return self.condition == "preempted" and num_output >= 2 + self.number % 5


def cases(seed: int, most: int | None, condition: str | None = None) -> list[Case]:
    """All cases of a pair, or those of a condition. `most`: the number per mode and condition, with random lengths; 0
    or None: all lengths.

    With all lengths, the first two conditions get each of them, and the others every third.
    """
    return [case for case in _cases(seed, most or None) if condition in (None, case.condition)]


def _cases(seed: int, most: int | None) -> Iterator[Case]:
    rng = np.random.default_rng(seed)
    number = 0
    for turn, condition in enumerate(CONDITIONS):
        for mode in MODES:
            lengths: Sequence[int] = LENGTHS
            if condition not in ("whole", "chunked"):
                lengths = LENGTHS[(turn + (mode == "pull")) % 3 :: 3]
            if most is not None and most < len(lengths):
                lengths = sorted(rng.choice(lengths, most, replace=False).tolist())
            for length in lengths:
                yield Case(condition, mode, length, number, seed)
                number += 1


def block_sizes(name: str, groups: Sequence[str]) -> tuple[str, str]:
    """`--block-size` of P and of D. `groups`: those that keep tokens in pages."""
    if name != PER_GROUP:
        return SIZES[name]
    p, d = (
        ",".join([str(sizes[0]), *(f"{group}={sizes[i % len(sizes)]}" for i, group in enumerate(groups))])
        for sizes in _PER_GROUP
    )
    return p, d

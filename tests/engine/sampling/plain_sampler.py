"""Sampling and verification by definition: one request, one row and one draft after the other.

The engine's batched computation must give bit-identical results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.sampling.noise import gumbel, uniform
from baton.engine.sampling.verifier import Verified
from baton.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]


class PlainSampler:
    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.num_prompt = len(prompt_ids)
        self.num_output = 0
        stop_ids = [*params.stop_token_ids] if params.ignore_eos else [*eos_ids, *params.stop_token_ids]
        self._min_tokens_ids = np.unique(np.asarray([i for i in stop_ids if i < vocab_size], dtype=np.int64))
        self._penalised = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        if self._penalised:
            self._counts = np.zeros(vocab_size, dtype=np.int64)
            self._seen = np.zeros(vocab_size, dtype=bool)
            self._seen[np.asarray(prompt_ids, dtype=np.int64)] = True

    def advance(self, token_ids: Sequence[int]) -> None:
        """Count tokens that were appended to the request's output."""
        self.num_output += len(token_ids)
        if self._penalised:
            np.add.at(self._counts, np.asarray(token_ids, dtype=np.int64), 1)
            self._seen[np.asarray(token_ids, dtype=np.int64)] = True

    def position(self, row: int) -> int:
        """Absolute position of the token chosen by `row` (0 = first row of the step)."""
        return self.num_prompt + self.num_output + row

    def noise(self, row: int) -> Scores:
        """Gumbel noise [V] of that position; zeros if greedy."""
        if self.params.temperature == 0.0:
            return np.zeros(self.vocab_size)
        assert self.params.seed is not None
        return gumbel(self.params.seed, self.params.sample_index, self.position(row), self.vocab_size)

    def scores(self, logits: Row, row: int, drafts_before: Sequence[int]) -> Scores:
        """Processed logits [V] in float64: argmax(scores + noise) is the token; -inf where masked."""
        params = self.params
        scores = logits.astype(np.float64)
        if params.logit_bias:
            for token, bias in params.logit_bias.items():
                scores[token] += bias
        if self.num_output + row < params.min_tokens:
            scores[self._min_tokens_ids] = -np.inf
        if self._penalised:
            self._penalise(scores, drafts_before)
        if params.temperature == 0.0:
            return scores
        scores /= params.temperature
        return _restrict(scores, params)

    def _penalise(self, scores: Scores, drafts_before: Sequence[int]) -> None:
        counts, seen = self._counts, self._seen
        if drafts_before:
            counts, seen = counts.copy(), seen.copy()
            np.add.at(counts, np.asarray(drafts_before, dtype=np.int64), 1)
            seen[np.asarray(drafts_before, dtype=np.int64)] = True
        params = self.params
        if params.repetition_penalty != 1.0:
            r = params.repetition_penalty
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / r, scores[seen] * r)
        scores -= params.frequency_penalty * counts
        scores -= params.presence_penalty * (counts > 0)

    def verify(self, logits_RV: npt.NDArray[np.float32], draft_ids: Sequence[int], rejection: bool) -> Verified:
        """Verify drafts against target logits [1 + num_drafts, V]. Without drafts: plain sampling."""
        if rejection and draft_ids and self.params.temperature > 0.0:
            seed = self.params.seed
            assert seed is not None
            return verify_rejection(
                draft_ids,
                lambda row: self.scores(logits_RV[row], row, draft_ids[:row]),
                lambda row: uniform(seed, self.params.sample_index, self.position(row)),
                self.noise,
            )

        def choose(row: int) -> int:
            return int(np.argmax(self.scores(logits_RV[row], row, draft_ids[:row]) + self.noise(row)))

        return verify_coupled(draft_ids, choose)


def _restrict(scores: Scores, params: SamplingParams) -> Scores:
    if params.min_p > 0.0:
        scores[scores < scores.max() + np.log(params.min_p)] = -np.inf
    if 0 < params.top_k < scores.size:
        kth = np.partition(scores, scores.size - params.top_k)[scores.size - params.top_k]
        scores[scores < kth] = -np.inf
    if params.top_p < 1.0:
        # Stable sort on the negated scores: ties go to the lower token id on every machine.
        order = np.argsort(-scores, kind="stable")
        weights = np.exp(scores[order] - scores[order[0]])
        cumulative = np.cumsum(weights / weights.sum())
        keep = int(np.searchsorted(cumulative, params.top_p, side="left")) + 1
        scores[order[keep:]] = -np.inf
    return scores


def verify_coupled(draft_ids: Sequence[int], choose: Callable[[int], int]) -> Verified:
    """`choose(j)` is the target's token at row j, after the drafts before it. Called up to the first mismatch."""
    token_ids: list[int] = []
    for row, draft in enumerate(draft_ids):
        token = choose(row)
        token_ids.append(token)
        if token != draft:
            return Verified(token_ids, row)
    token_ids.append(choose(len(draft_ids)))
    return Verified(token_ids, len(draft_ids))


def verify_rejection(
    draft_ids: Sequence[int],
    scores: Callable[[int], Scores],
    uniform: Callable[[int], float],
    noise: Callable[[int], Scores],
) -> Verified:
    """`scores(j)`: processed target logits [V] of row j (-inf where masked); `uniform(j)`, `noise(j)`: its draws."""
    token_ids: list[int] = []
    for row, draft in enumerate(draft_ids):
        row_scores = scores(row)
        if uniform(row) < float(_softmax(row_scores)[draft]):
            token_ids.append(int(draft))
            continue
        residual = row_scores.copy()
        residual[draft] = -np.inf
        token_ids.append(int(np.argmax(residual + noise(row))))
        return Verified(token_ids, row)
    last = len(draft_ids)
    token_ids.append(int(np.argmax(scores(last) + noise(last))))
    return Verified(token_ids, last)


def _softmax(scores: Scores) -> Scores:
    weights: Scores = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights

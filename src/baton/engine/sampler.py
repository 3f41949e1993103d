"""Choice of tokens from target logits, row by row in NumPy, so that a row never depends on what else is in the batch.

Order of processing (as in vLLM): logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p, noise.
Logprobs are those of the raw logits. Penalties at a draft row see the drafts before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.noise import gumbel, uniform
from baton.engine.verifier import Verified, verify_coupled, verify_rejection
from baton.wire import SamplingParams, TokenLogprobs

Row = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]


class SamplerState:
    """Per-request sampling state: what penalties have seen. Mutated only by `advance`."""

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
        self.plain_greedy = (
            params.temperature == 0.0
            and not self._penalised
            and not params.logit_bias
            and params.min_tokens == 0
            and params.logprobs is None
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """Tokens that were appended to the request's output."""
        self.num_output += len(token_ids)
        if self._penalised:
            np.add.at(self._counts, np.asarray(token_ids, dtype=np.int64), 1)
            self._seen[np.asarray(token_ids, dtype=np.int64)] = True

    def position(self, row: int) -> int:
        """Absolute position of the token that `row` (0 = first row of the step) chooses."""
        return self.num_prompt + self.num_output + row

    def noise(self, row: int) -> Scores:
        """Gumbel noise [V] of that position; zeros when greedy."""
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
        """Verify drafts against target logits [1 + num_drafts, V]; without drafts: plain sampling."""
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


def token_logprobs(logits: Row, token: int, num_top: int) -> TokenLogprobs:
    """Logprob of `token` under the raw logits [V] and the `num_top` most likely tokens, best first."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    top: npt.NDArray[np.int64] | list[int] = np.argsort(-wide, kind="stable")[:num_top] if num_top else []
    return TokenLogprobs(float(wide[token]), [(int(i), float(wide[i])) for i in top])

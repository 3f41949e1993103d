"""Chooses tokens from logits, for a batch at once, on the logits' device.

Order of processing (as in vLLM): grammar, logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p, noise.
Each number equals that of the same float64 operation on one row. A device computes only what is exact: selections and
single IEEE operations; logarithms, exponentials and sums are NumPy's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.sampling.noise import gumbel, gumbel_rows, uniform
from baton.engine.sampling.nonfinite import rows_not_finite
from baton.engine.sampling.verifier import rejection_choice
from baton.engine.step_plans import NOT_FINITE, FloatArray, IntArray, Noise, Sampling
from baton.structured.drafting import Constrained

# Scores processed at once, so that several passes stay in a cache.
_BLOCK = 1 << 19
_MINUS_INFINITY = float("-inf")


def choose_tokens(logits_NV: Tensor, sampling: Sampling | None) -> IntArray:
    """`StepResult.choices`, int64 [N]. `NOT_FINITE` whatever the request allows."""
    not_finite = rows_not_finite(logits_NV)
    if not len(not_finite):
        return _choices(logits_NV, sampling)
    choices = _choices(logits_NV.index_fill(0, _tensor(not_finite, logits_NV), 0.0), sampling)
    choices[not_finite] = NOT_FINITE
    return choices


def _choices(logits_NV: Tensor, sampling: Sampling | None) -> IntArray:
    if sampling is None:
        best: IntArray = logits_NV.argmax(dim=-1).cpu().numpy()
        return best
    num_rows, vocab_size = logits_NV.shape
    choices = np.full(num_rows, -1, dtype=np.int64)
    if len(sampling.row) < num_rows:
        choices[:] = logits_NV.argmax(dim=-1).cpu().numpy()
    for rows in _blocks(sampling.draft, max(1, _BLOCK // vocab_size)):
        block = sampling.take(rows)
        logits_SV = logits_NV if len(rows) == num_rows else logits_NV[_tensor(block.row, logits_NV)]
        choices[block.row] = _chosen(process_logits(logits_SV, block), block)
    return choices


def _blocks(draft: IntArray, at_once: int) -> list[IntArray]:
    """Whole requests, about `at_once` rows each."""
    if len(draft) <= at_once:
        return [np.arange(len(draft))]
    ends = np.flatnonzero(draft < 0) + 1
    last = ends[np.flatnonzero(np.diff(ends // at_once, append=-1))]
    return [np.arange(start, stop) for start, stop in zip([0, *last[:-1].tolist()], last.tolist(), strict=True)]


def _chosen(scores: Tensor, sampling: Sampling) -> IntArray:
    """Choose from processed scores [S, V] of all rows of some requests."""
    temperature = sampling.noise.temperature
    found = np.full(len(temperature), -1, dtype=np.int64)
    # First rows of all requests, then second rows of those whose draft was chosen, and so on.
    current = np.flatnonzero(np.concatenate(([-1], sampling.draft[:-1])) < 0)
    cut = (sampling.top_p < 1.0) & (temperature > 0.0)
    while len(current):
        _cut_nucleus(scores, current[cut[current]], sampling.top_p)
        drawn = np.flatnonzero(temperature[current])
        noise = gumbel_rows(sampling.noise.take(current[drawn]), sampling.position[current[drawn]], scores.shape[1])
        noisy = scores.index_select(0, _tensor(current, scores))
        if len(drawn) == len(current):
            noisy += _tensor(noise, scores)
        else:
            noisy.index_add_(0, _tensor(drawn, scores), _tensor(noise, scores))
        found[current] = noisy.argmax(dim=-1).cpu().numpy()
        if sampling.rejection:
            for row, own_noise in zip(current[drawn].tolist(), noise, strict=True):
                if sampling.draft[row] >= 0:
                    found[row] = _verified(scores[row].cpu().numpy(), sampling, row, own_noise)
        current = current[found[current] == sampling.draft[current]] + 1
    return found


def _verified(scores: FloatArray, sampling: Sampling, row: int, noise: FloatArray) -> int:
    seed, sample_index = int(sampling.noise.seed[row]), int(sampling.noise.sample_index[row])
    draw = uniform(seed, sample_index, int(sampling.position[row]))
    return rejection_choice(scores, int(sampling.draft[row]), draw, noise)


def process_logits(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """Float64 [S, V], without top_p, which is applied only to rows that are reached."""
    scores = logits_SV.double()
    if len(sampling.allowed.row):
        rows = _tensor(sampling.allowed.row, scores)
        scores[rows] = scores[rows].masked_fill(~_unpacked(sampling.allowed.bits, scores), _MINUS_INFINITY)
    if len(sampling.bias.row):
        at = _tensor(sampling.bias.row, scores), _tensor(sampling.bias.token, scores)
        scores[at] = scores[at] + _tensor(sampling.bias.value, scores)
    if len(sampling.masked.row):
        scores[_tensor(sampling.masked.row, scores), _tensor(sampling.masked.token, scores)] = _MINUS_INFINITY
    if len(sampling.counts.row):
        _penalise(scores, sampling)
    drawn = sampling.noise.temperature > 0.0
    if drawn.any():
        # A device may multiply by a scalar's reciprocal instead.
        scores /= _tensor(np.where(drawn, sampling.noise.temperature, 1.0), scores)[:, None]
        _restrict(scores, sampling, drawn)
    return scores


def _penalise(scores: Tensor, sampling: Sampling) -> None:
    rows, counts = sampling.counts.row, _tensor(sampling.counts.value, scores)
    at = _tensor(rows, scores), _tensor(sampling.counts.token, scores)
    values = scores[at]
    repetition = _tensor(sampling.repetition[rows], scores)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - _tensor(sampling.frequency[rows], scores) * counts
    scores[at] = values - _tensor(sampling.presence[rows], scores) * (counts > 0)


def _restrict(scores: Tensor, sampling: Sampling, drawn: np.ndarray) -> None:
    vocab_size = scores.shape[1]
    rows = np.flatnonzero(drawn & (sampling.log_min_p > _MINUS_INFINITY))
    if len(rows):
        where = _tensor(rows, scores)
        some = scores[where]
        least = some.amax(dim=-1, keepdim=True) + _tensor(sampling.log_min_p[rows], scores)[:, None]
        scores[where] = some.masked_fill(some < least, _MINUS_INFINITY)
    rows = np.flatnonzero(drawn & (sampling.top_k > 0) & (sampling.top_k < vocab_size))
    if len(rows):
        where, top_k = _tensor(rows, scores), sampling.top_k[rows]
        some = scores[where]
        largest = some.topk(int(top_k.max()), dim=-1).values
        least = largest.gather(1, _tensor(top_k - 1, scores)[:, None])
        scores[where] = some.masked_fill(some < least, _MINUS_INFINITY)


def _cut_nucleus(scores: Tensor, rows: IntArray, top_p: FloatArray) -> None:
    for row in rows.tolist():
        outside = _outside_nucleus(scores[row].cpu().numpy(), float(top_p[row]))
        scores[row, _tensor(outside, scores)] = _MINUS_INFINITY


def _outside_nucleus(scores: FloatArray, top_p: float) -> IntArray:
    # Ties go to the lower token id on every machine.
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores[order[0]])
    cumulative = np.cumsum(weights / weights.sum())
    return order[int(np.searchsorted(cumulative, top_p, side="left")) + 1 :]


class DraftSampler:
    """Chooses drafts with the target's noise at their positions. `first_position` [R]: of each request's first
    draft."""

    def __init__(
        self, noise: Noise, first_position: IntArray, vocab_size: int, constrained: Constrained | None = None
    ) -> None:
        self._noise, self._first, self._vocab_size = noise, first_position, vocab_size
        self._constrained = constrained
        self._greedy = not noise.temperature.any()

    def __call__(self, logits_RV: Tensor, requests: IntArray, step: int, target_ids: Tensor | None) -> IntArray:
        if self._constrained is None:
            return self._choose(logits_RV, requests, step, target_ids)
        some = [(row, self._constrained.bits(request)) for row, request in enumerate(requests.tolist())]
        bits = {row: allowed for row, allowed in some if allowed is not None}
        if bits:
            allowed_RV = _unpacked(np.stack(list(bits.values())), logits_RV, self._vocab_size)
            allowed_RV = allowed_RV if target_ids is None else allowed_RV.index_select(1, target_ids)
            rows = _tensor(np.array(list(bits)), logits_RV)
            masked_RV = logits_RV.index_select(0, rows).masked_fill(~allowed_RV, _MINUS_INFINITY)
            logits_RV = logits_RV.index_copy(0, rows, masked_RV)
        chosen = self._choose(logits_RV, requests, step, target_ids)
        for request, token in zip(requests.tolist(), chosen.tolist(), strict=True):
            self._constrained.chose(request, token)
        return chosen

    def noise(self, requests: IntArray, step: int) -> tuple[FloatArray, list[FloatArray | None]] | None:
        """As `drafters.base.DraftNoise`, without tokens that a grammar forbids."""
        if self._greedy:
            return None
        own, position = self._noise.take(requests), self._first[requests] + step
        words = zip(own.seed.tolist(), own.sample_index.tolist(), position.tolist(), own.temperature, strict=True)
        noise = [gumbel(*word, self._vocab_size) if temperature else None for *word, temperature in words]
        return own.temperature, noise

    def _choose(self, logits_RV: Tensor, requests: IntArray, step: int, target_ids: Tensor | None) -> IntArray:
        if self._greedy:
            likeliest = logits_RV.argmax(dim=-1)
            ids: IntArray = (likeliest if target_ids is None else target_ids[likeliest]).cpu().numpy()
            return ids
        drawn = np.flatnonzero(self._noise.temperature[requests])
        best = np.empty(len(requests), dtype=np.int64)
        if len(drawn) < len(requests):
            best[:] = logits_RV.argmax(dim=-1).cpu().numpy()
        at_once = max(1, _BLOCK // self._vocab_size)
        for rows in (drawn[i : i + at_once] for i in range(0, len(drawn), at_once)):
            own = self._noise.take(requests[rows])
            noise = _tensor(gumbel_rows(own, self._first[requests[rows]] + step, self._vocab_size), logits_RV)
            logits = logits_RV if len(rows) == len(requests) else logits_RV.index_select(0, _tensor(rows, logits_RV))
            scores = logits.double() / _tensor(own.temperature, logits_RV)[:, None]
            scores += noise if target_ids is None else noise.index_select(1, target_ids)
            best[rows] = scores.argmax(dim=-1).cpu().numpy()
        if target_ids is None:
            return best
        picked: IntArray = target_ids.index_select(0, _tensor(best, target_ids)).cpu().numpy()
        return picked


def _unpacked(bits: npt.NDArray[np.uint8], like: Tensor, vocab_size: int | None = None) -> Tensor:
    """[rows, bytes] to bool [rows, V]. `like` gives V unless `vocab_size` does."""
    unpacked = np.unpackbits(bits, axis=1, count=vocab_size or like.shape[1], bitorder="little")
    return torch.from_numpy(unpacked).to(like.device).bool()


def _tensor(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)

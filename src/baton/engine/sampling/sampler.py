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

from baton.engine.sampling.noise import gumbel_rows, uniform
from baton.engine.sampling.nonfinite import rows_not_finite
from baton.engine.sampling.verifier import rejection_choice
from baton.engine.step_plans import NOT_FINITE, FloatArray, IntArray, Sampling
from baton.kernels.cpu.greatest import first_greatest

# Scores processed at once, so that several passes stay in a cache.
BLOCK_SIZE = 1 << 19
MINUS_INFINITY = float("-inf")


def choose_tokens(logits_NV: Tensor, sampling: Sampling | None, greedy: IntArray | None = None) -> IntArray:
    """`StepResult.choices`, int64 [N]. `NOT_FINITE` has priority over what the request allows. `greedy`: those without
    `sampling`, if known."""
    if greedy is None:
        greedy = _greedy(logits_NV, sampling)
    if sampling is None:
        return greedy
    not_finite = np.flatnonzero(greedy == NOT_FINITE)
    if len(not_finite):
        logits_NV = logits_NV.index_fill(0, on_device(not_finite, logits_NV), 0.0)
    choices: IntArray = greedy.copy()
    choices[sampling.row] = -1
    num_rows, vocab_size = logits_NV.shape
    for rows in _blocks(sampling.draft, max(1, BLOCK_SIZE // vocab_size)):
        block = sampling.take(rows)
        logits_SV = logits_NV if len(rows) == num_rows else logits_NV[on_device(block.row, logits_NV)]
        choices[block.row] = _chosen(process_logits(logits_SV, block), block)
    choices[not_finite] = NOT_FINITE
    return choices


def _greedy(logits_NV: Tensor, sampling: Sampling | None) -> IntArray:
    """Choices of the rows without `sampling`; `NOT_FINITE` for any row."""
    if logits_NV.device.type == "cpu" and logits_NV.dtype is torch.float32 and logits_NV.is_contiguous():
        choices: IntArray = first_greatest(logits_NV)
        choices[choices < 0] = NOT_FINITE
        return choices
    choices = np.zeros(len(logits_NV), dtype=np.int64)
    if sampling is None or len(sampling.row) < len(logits_NV):
        choices[:] = logits_NV.argmax(dim=-1).cpu().numpy()
    choices[rows_not_finite(logits_NV)] = NOT_FINITE
    return choices


def _blocks(draft: IntArray, at_once: int) -> list[IntArray]:
    """Whole requests, about `at_once` rows each."""
    if len(draft) <= at_once:
        return [np.arange(len(draft))]
    ends = np.flatnonzero(draft < 0) + 1
    last = ends[np.flatnonzero(np.diff(ends // at_once, append=-1))]
    return [np.arange(start, stop) for start, stop in zip([0, *last[:-1].tolist()], last.tolist(), strict=True)]


def _chosen(scores: Tensor, sampling: Sampling) -> IntArray:
    """Choices [S] from processed scores [S, V] of all rows of some requests; -1: not reached."""
    temperature = sampling.noise.temperature
    choices = np.full(len(temperature), -1, dtype=np.int64)
    # First rows of all requests, then second rows of those whose draft was chosen, and so on.
    current = np.flatnonzero(np.concatenate(([-1], sampling.draft[:-1])) < 0)
    cut = (sampling.top_p < 1.0) & (temperature > 0.0)
    while len(current):
        _cut_nucleus(scores, current[cut[current]], sampling.top_p)
        drawn = np.flatnonzero(temperature[current])
        noise = gumbel_rows(sampling.noise.take(current[drawn]), sampling.position[current[drawn]], scores.shape[1])
        noisy = scores.index_select(0, on_device(current, scores))
        if len(drawn) == len(current):
            noisy += on_device(noise, scores)
        else:
            noisy.index_add_(0, on_device(drawn, scores), on_device(noise, scores))
        choices[current] = noisy.argmax(dim=-1).cpu().numpy()
        if sampling.rejection:
            for row, own_noise in zip(current[drawn].tolist(), noise, strict=True):
                if sampling.draft[row] >= 0:
                    choices[row] = _verified(scores[row].cpu().numpy(), sampling, row, own_noise)
        current = current[choices[current] == sampling.draft[current]] + 1
    return choices


def _verified(scores: FloatArray, sampling: Sampling, row: int, noise: FloatArray) -> int:
    seed, sample_index = int(sampling.noise.seed[row]), int(sampling.noise.sample_index[row])
    draw = uniform(seed, sample_index, int(sampling.position[row]))
    return rejection_choice(scores, int(sampling.draft[row]), draw, noise)


def process_logits(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """Float64 [S, V], without top_p, which only reached rows get."""
    scores = logits_SV.double()
    if len(sampling.allowed.row):
        rows = on_device(sampling.allowed.row, scores)
        scores[rows] = scores[rows].masked_fill(~unpack_masks(sampling.allowed.bits, scores), MINUS_INFINITY)
    if len(sampling.bias.row):
        at = on_device(sampling.bias.row, scores), on_device(sampling.bias.token, scores)
        scores[at] = scores[at] + on_device(sampling.bias.value, scores)
    if len(sampling.masked.row):
        scores[on_device(sampling.masked.row, scores), on_device(sampling.masked.token, scores)] = MINUS_INFINITY
    if len(sampling.counts.row):
        _penalise(scores, sampling)
    drawn = sampling.noise.temperature > 0.0
    if drawn.any():
        # A device may multiply by a scalar's reciprocal instead.
        scores /= on_device(np.where(drawn, sampling.noise.temperature, 1.0), scores)[:, None]
        _restrict(scores, sampling, drawn)
    return scores


def _penalise(scores: Tensor, sampling: Sampling) -> None:
    rows, counts = sampling.counts.row, on_device(sampling.counts.value, scores)
    at = on_device(rows, scores), on_device(sampling.counts.token, scores)
    values = scores[at]
    repetition = on_device(sampling.repetition[rows], scores)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - on_device(sampling.frequency[rows], scores) * counts
    scores[at] = values - on_device(sampling.presence[rows], scores) * (counts > 0)


def _restrict(scores: Tensor, sampling: Sampling, drawn: np.ndarray) -> None:
    vocab_size = scores.shape[1]
    rows = np.flatnonzero(drawn & (sampling.log_min_p > MINUS_INFINITY))
    if len(rows):
        where = on_device(rows, scores)
        some = scores[where]
        least = some.amax(dim=-1, keepdim=True) + on_device(sampling.log_min_p[rows], scores)[:, None]
        scores[where] = some.masked_fill(some < least, MINUS_INFINITY)
    rows = np.flatnonzero(drawn & (sampling.top_k > 0) & (sampling.top_k < vocab_size))
    if len(rows):
        where, top_k = on_device(rows, scores), sampling.top_k[rows]
        some = scores[where]
        largest = some.topk(int(top_k.max()), dim=-1).values
        least = largest.gather(1, on_device(top_k - 1, scores)[:, None])
        scores[where] = some.masked_fill(some < least, MINUS_INFINITY)


def _cut_nucleus(scores: Tensor, rows: IntArray, top_p: FloatArray) -> None:
    for row in rows.tolist():
        outside = _outside_nucleus(scores[row].cpu().numpy(), float(top_p[row]))
        scores[row, on_device(outside, scores)] = MINUS_INFINITY


def _outside_nucleus(scores: FloatArray, top_p: float) -> IntArray:
    # Ties go to the lower token id on every machine.
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores[order[0]])
    cumulative = np.cumsum(weights / weights.sum())
    return order[int(np.searchsorted(cumulative, top_p, side="left")) + 1 :]


def unpack_masks(bits: npt.NDArray[np.uint8], like: Tensor, vocab_size: int | None = None) -> Tensor:
    """`Masks.bits` [rows, bytes] to bool [rows, V]. `like` gives V unless `vocab_size` does."""
    unpacked = np.unpackbits(bits, axis=1, count=vocab_size or like.shape[1], bitorder="little")
    return torch.from_numpy(unpacked).to(like.device).bool()


def on_device(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)

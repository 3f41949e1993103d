"""An LM head and the choice of tokens: argmax of logits, or of logits over temperature plus noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit, jit_inline
from baton.kernels.cpu.fused.fields import (
    BESTS,
    CHECKS,
    CHOSEN,
    HEAD,
    HIDDEN,
    LOGITS,
    MARGINS,
    NOISES,
    NUM_SAMPLED,
    OUTPUTS,
    TARGET_IDS,
    TEMPERATURES,
    VOCAB,
)
from baton.kernels.cpu.fused.products import BLOCK_BYTES, multiply, operand
from baton.kernels.cpu.fused.rows import BF16, ELEMENT_BYTES, number_at
from baton.kernels.cpu.fused.stages import STAGE_BYTES, finish, num_slots, take_piece, take_slot
from baton.kernels.cpu.gemm.small_gemm import num_pieces, outputs_of
from baton.kernels.cpu.greatest import AT_ONCE, BFLOAT16, exceeds
from baton.kernels.cpu.omp import pointer
from baton.kernels.cpu.scalar import to_f32

# The state of a thread's row: the best score and the second (float64), the best one's token, and the limit that the
# order of a better one reaches (uint16).
_COLUMNS = 4
_SCORE, _SECOND, _TOKEN, _LIMIT = range(_COLUMNS)
BEST_BYTES = 8 * _COLUMNS
_SIGN, _INFINITE, _WIDE_BYTES = 0x8000, 0x7F80, 4
_MINUS_INFINITY = -np.inf
_order, _greatest, _limit_above = BFLOAT16


@jit
def _second(logits: Any, best: int) -> Any:
    """The order of the greatest logit but number `best`."""
    second = np.int64(-_INFINITE)
    for i in range(len(logits)):
        if i != best:
            second = max(second, _order(logits[i]))
    return np.float64(second)


@jit
def _logit(order: float) -> Any:
    bits = np.int64(order)
    return np.float64(to_f32(np.uint16(bits if bits >= 0 else _SIGN - bits)))


@jit_inline
def _noisiest(a: Any, n: int, noise_at: int, logits: Any, first: int) -> tuple[float, int, float]:
    """The greatest score, its number, and the second."""
    temperature = carray(pointer(a[TEMPERATURES], np.float64(0.0)), (n + 1,))[n]
    best, place, second = _MINUS_INFINITY, first, _MINUS_INFINITY
    for i in range(len(logits)):
        token = number_at(a[TARGET_IDS], first + i) if a[TARGET_IDS] != 0 else first + i
        noise = carray(pointer(noise_at, np.float64(0.0)), (token + 1,))[token]
        score = np.float64(to_f32(logits[i])) / temperature + noise
        if score > best:
            best, place, second = score, first + i, best
        else:
            second = max(second, score)
    return best, place, second


@jit
def _may_improve(at: int, count: int, limit: int) -> Any:
    """Of a block, or half of one."""
    least = np.uint16(limit)
    return exceeds(at, least) or (count > AT_ONCE and exceeds(at + AT_ONCE * ELEMENT_BYTES, least))


@jit
def _keep_logits(a: Any, n: int, at: int, first: int, count: int) -> None:
    to = number_at(a[LOGITS], n) if a[LOGITS] != 0 else 0
    if to != 0:
        logits = carray(pointer(at, BF16), (count,))
        kept = carray(pointer(to + first * _WIDE_BYTES, np.float32(0.0)), (count,))
        for i in range(count):
            kept[i] = to_f32(logits[i])


@jit_inline
def _state(a: Any, slot: int, n: int) -> tuple[Any, Any]:
    """A row's state in a thread's slot: as numbers, and as scores."""
    at = a[BESTS] + (slot * a[NUM_SAMPLED] + n) * BEST_BYTES
    return carray(pointer(at, np.int64(0)), (_COLUMNS,)), carray(pointer(at, np.float64(0.0)), (_COLUMNS,))


@jit_inline
def _improve(a: Any, n: int, noise_at: int, logits: Any, first: int, slot: int) -> None:
    """The state of a row after a block that may hold a better one."""
    numbers, scores = _state(a, slot, n)
    second = _MINUS_INFINITY
    if noise_at != 0:
        best, token, second = _noisiest(a, n, noise_at, logits, first)
    else:
        best, token = _greatest(logits, first, a[CHECKS])
        if a[MARGINS] != 0:
            second = _second(logits, token - first)
    if best > scores[_SCORE]:
        scores[_SECOND] = max(scores[_SCORE], second)
        scores[_SCORE], numbers[_TOKEN] = best, token
    else:
        scores[_SECOND] = max(scores[_SECOND], best)
    if noise_at == 0:
        numbers[_LIMIT] = np.int64(_limit_above(scores[_SCORE if a[MARGINS] == 0 else _SECOND]))


@jit_inline
def head(a: Any, int8: Any, scratch: int, stage: int) -> None:
    """Two stages. A thread keeps the best of its pieces, the first of equal ones since they ascend, and the second if
    margins are wanted."""
    num_rows, vocab, weight = a[NUM_SAMPLED], a[VOCAB], a[HEAD : HEAD + 3]
    total, mine, slot = num_pieces(vocab), 0, 0
    x = operand(a, int8, num_rows, a[OUTPUTS], a[HIDDEN], stage)
    stage += STAGE_BYTES
    piece = take_piece(stage)
    if piece < total:
        slot = take_slot(stage)
        for n in range(num_rows):
            numbers, scores = _state(a, slot, n)
            scores[_SCORE] = scores[_SECOND] = _MINUS_INFINITY
            numbers[_TOKEN], numbers[_LIMIT] = outputs_of(vocab, piece)[0], 0
    while piece < total:
        first, count = outputs_of(vocab, piece)
        following = take_piece(stage)
        multiply(a, int8, num_rows, x, a[HIDDEN], weight, vocab, piece, scratch, BLOCK_BYTES, following)
        for n in range(num_rows):
            at = scratch + n * BLOCK_BYTES
            noise_at = number_at(a[NOISES], n) if a[NOISES] != 0 else 0
            if noise_at != 0 or _may_improve(at, count, _state(a, slot, n)[0][_LIMIT]):
                _improve(a, n, noise_at, carray(pointer(at, BF16), (count,)), first, slot)
            _keep_logits(a, n, at, first, count)
        mine += 1
        piece = following
    finish(stage, mine, total)


@jit_inline
def choose(a: Any, stage: int) -> None:
    """After `head`, whose second stage is just before."""
    num_rows, slots, mine = a[NUM_SAMPLED], num_slots(stage - STAGE_BYTES), 0
    chosen = carray(pointer(a[CHOSEN], np.int64(0)), (num_rows,))
    n = take_piece(stage)
    while n < num_rows:
        best, token, second = _MINUS_INFINITY, np.int64(a[VOCAB]), _MINUS_INFINITY
        for slot in range(slots):
            numbers, scores = _state(a, slot, n)
            second = max(second, min(best, scores[_SCORE]), scores[_SECOND])
            if scores[_SCORE] > best or (scores[_SCORE] == best and numbers[_TOKEN] < token):
                best, token = scores[_SCORE], numbers[_TOKEN]
        chosen[n] = number_at(a[TARGET_IDS], token) if a[TARGET_IDS] != 0 and token >= 0 else token
        if a[MARGINS] != 0:
            if a[NOISES] == 0 or number_at(a[NOISES], n) == 0:
                best, second = _logit(best), _logit(second)
            carray(pointer(a[MARGINS], np.float64(0.0)), (num_rows,))[n] = best - second
        mine += 1
        n = take_piece(stage)
    finish(stage, mine, num_rows)

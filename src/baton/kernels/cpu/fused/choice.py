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
    MARGINS,
    NOISES,
    NUM_SAMPLED,
    OUTPUTS,
    TARGET_IDS,
    TEMPERATURES,
    VOCAB,
)
from baton.kernels.cpu.fused.products import BLOCK_BYTES, multiply, operand
from baton.kernels.cpu.fused.rows import BF16, number_at
from baton.kernels.cpu.fused.stages import STAGE_BYTES, finish, take_piece
from baton.kernels.cpu.gemm.small_gemm import num_pieces, outputs_of
from baton.kernels.cpu.omp import pointer
from baton.kernels.cpu.scalar import to_f32

_SIGN, _INFINITE = 0x8000, 0x7F80
_MINUS_INFINITY = -np.inf


@jit
def _order(bits: Any) -> Any:
    """An integer with the order of bfloat16 numbers."""
    return np.int64(bits) if bits < _SIGN else _SIGN - np.int64(bits)


@jit
def _likeliest(logits: Any, first: int, checks: int) -> tuple[float, int]:
    """The greatest logit's order, and its number; with `checks` -1 if one is not finite."""
    best, magnitude = np.int64(-_SIGN), np.int64(0)
    for i in range(len(logits)):
        best = max(best, _order(logits[i]))
        magnitude = max(magnitude, np.int64(logits[i] & (_SIGN - 1)))
    if checks != 0 and magnitude >= _INFINITE:
        return np.inf, -1
    place = 0
    while place < len(logits) - 1 and _order(logits[place]) < best:
        place += 1
    return np.float64(best), first + place


@jit
def _second(logits: Any, best: int) -> Any:
    """The order of the greatest logit but number `best`."""
    second = np.int64(-_INFINITE)
    for i in range(best):
        second = max(second, _order(logits[i]))
    for i in range(best + 1, len(logits)):
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


@jit_inline
def head(a: Any, int8: Any, scratch: int, stage: int) -> None:
    """Two stages. Each piece of the logits keeps its best, and its second if margins are wanted."""
    num_rows, vocab, weight = a[NUM_SAMPLED], a[VOCAB], a[HEAD : HEAD + 3]
    total, mine = num_pieces(vocab), 0
    x = operand(a, int8, num_rows, a[OUTPUTS], a[HIDDEN], stage)
    stage += STAGE_BYTES
    bests = carray(pointer(a[BESTS], np.float64(0.0)), (num_rows, total))
    places = carray(pointer(a[BESTS] + 8 * num_rows * total, np.int64(0)), (num_rows, total))
    seconds = carray(pointer(a[BESTS] + 16 * num_rows * total, np.float64(0.0)), (num_rows, total))
    piece = take_piece(stage)
    while piece < total:
        first, count = outputs_of(vocab, piece)
        following = take_piece(stage)
        multiply(a, int8, num_rows, x, a[HIDDEN], weight, vocab, piece, scratch, BLOCK_BYTES, following)
        for n in range(num_rows):
            logits = carray(pointer(scratch + n * BLOCK_BYTES, BF16), (count,))
            noise_at = number_at(a[NOISES], n) if a[NOISES] != 0 else 0
            if noise_at == 0:
                bests[n, piece], places[n, piece] = _likeliest(logits, first, a[CHECKS])
                if a[MARGINS] != 0:
                    seconds[n, piece] = _second(logits, places[n, piece] - first)
            else:
                bests[n, piece], places[n, piece], seconds[n, piece] = _noisiest(a, n, noise_at, logits, first)
        mine += 1
        piece = following
    finish(stage, mine, total)


@jit_inline
def _margin(a: Any, n: int, bests: Any, best: int) -> None:
    num_rows, pieces = a[NUM_SAMPLED], len(bests)
    second = carray(pointer(a[BESTS] + 16 * num_rows * pieces, np.float64(0.0)), (num_rows, pieces))[n, best]
    for piece in range(pieces):
        if piece != best:
            second = max(second, bests[piece])
    first = bests[best]
    if a[NOISES] == 0 or number_at(a[NOISES], n) == 0:
        first, second = _logit(first), _logit(second)
    carray(pointer(a[MARGINS], np.float64(0.0)), (num_rows,))[n] = first - second


@jit_inline
def choose(a: Any, stage: int) -> None:
    num_rows, pieces, mine = a[NUM_SAMPLED], num_pieces(a[VOCAB]), 0
    bests = carray(pointer(a[BESTS], np.float64(0.0)), (num_rows, pieces))
    places = carray(pointer(a[BESTS] + 8 * num_rows * pieces, np.int64(0)), (num_rows, pieces))
    chosen = carray(pointer(a[CHOSEN], np.int64(0)), (num_rows,))
    n = take_piece(stage)
    while n < num_rows:
        best = 0
        for piece in range(1, pieces):
            if bests[n, piece] > bests[n, best]:
                best = piece
        token = places[n, best]
        chosen[n] = number_at(a[TARGET_IDS], token) if a[TARGET_IDS] != 0 and token >= 0 else token
        if a[MARGINS] != 0:
            _margin(a, n, bests[n], best)
        mine += 1
        n = take_piece(stage)
    finish(stage, mine, num_rows)

"""Add one tile of keys and values to the vectors that see it: the arithmetic of all CPU attention kernels.

Online softmax (Milakov & Gimelshein, 2018) over tiles of 64 keys at ABSOLUTE positions 0, 64, 128, ... Keys are
transposed: the scores of 64 keys are 64 independent lanes, and the sum over the head size runs in order.

Shapes: N vectors, D elements of a query, C of a value, P: C rounded up to a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.jit_cache import jit
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS, pair_products
from baton.kernels.cpu.scalar import exp32, from_f32, to_f32
from baton.kernels.cpu.simd import CHUNKS, LANES, LINE_BYTES, chunks_at_once, exponentials, largest, products
from baton.kernels.cpu.transposes import copy_line, divide

TILE = CHUNKS * LANES
# Vectors with sums in registers, which changes no bits.
ROW_BLOCK = 4
_AT_ONCE_1, _AT_ONCE_2, _AT_ONCE_3, _AT_ONCE_4 = (chunks_at_once(rows) for rows in range(1, ROW_BLOCK + 1))
F32_BYTES = 4
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
MINUS_INFINITY = np.float32(-np.inf)


@jit
def from_a_line(array: Any, count: int) -> Any:
    """So many elements, from the start of a cache line."""
    skipped = -array.ctypes.data % LINE_BYTES // array.itemsize
    return array[skipped : skipped + count]


@jit
def multiply(
    num_rows: int, left: Any, row_bytes: int, right: Any, right_bytes: int, steps: int, factors: Any, out: Any,
    out_bytes: int, width: int,
) -> None:  # fmt: skip
    if num_rows == 4:
        products(4, _AT_ONCE_4, left, row_bytes, right, right_bytes, steps, width, factors, out, out_bytes)
    elif num_rows == 3:
        products(3, _AT_ONCE_3, left, row_bytes, right, right_bytes, steps, width, factors, out, out_bytes)
    elif num_rows == 2:
        products(2, _AT_ONCE_2, left, row_bytes, right, right_bytes, steps, width, factors, out, out_bytes)
    else:
        products(1, _AT_ONCE_1, left, row_bytes, right, right_bytes, steps, width, factors, out, out_bytes)


@jit
def _multiply_pairs(num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, scale: Any, out: Any) -> None:
    if num_rows == 4:
        pair_products(4, left, row_bytes, right, steps, scale, out)
    elif num_rows == 3:
        pair_products(3, left, row_bytes, right, steps, scale, out)
    elif num_rows == 2:
        pair_products(2, left, row_bytes, right, steps, scale, out)
    else:
        pair_products(1, left, row_bytes, right, steps, scale, out)


@jit
def _add_own(
    row: int, first: Any, last: Any, scores: Any, values: Any, factors: Any, out: Any, width: int
) -> None:  # fmt: skip
    """Add tokens [first, last) of the tile for the vector of scratch row `row`, to its sums at `out`."""
    score_bytes, value_bytes = F32_BYTES * TILE, F32_BYTES * width
    multiply(
        1, scores + row * score_bytes + first * F32_BYTES, score_bytes, values + first * value_bytes, value_bytes,
        last - first, factors + row * F32_BYTES, out, value_bytes, width,
    )  # fmt: skip


@jit
def take_queries(
    query: Any, positions: Any, sinks: Any, start: int, head: int, group: int, scale: Any, seen: Any, queries: Any,
    pairs: Any, maxima: Any, totals: Any,
) -> None:  # fmt: skip
    size, query_at, pairs_at = queries.shape[1], np.int64(query.ctypes.data), np.int64(pairs.ctypes.data)
    for i in range(len(seen)):
        row, first = start + i // group, (head * group + i % group) * size
        seen[i] = positions[row]
        if len(pairs) > 0:  # of whole lines
            source = query_at + row * query.strides[0] + first * query.itemsize
            for offset in range(0, size * query.itemsize, LINE_BYTES):
                copy_line(source + offset, pairs_at + i * size * query.itemsize + offset)
        else:
            for d in range(size):
                queries[i, d] = to_f32(query[row, first + d]) * scale
        if len(sinks):
            # A sink is a logit without a value, summed before the first tile.
            maxima[i], totals[i] = sinks[head * group + i % group], _ONE


@jit
def store_means(sums: Any, totals: Any, start: int, head: int, group: int, size: int, out: Any) -> None:
    element, sums_at, out_at = out[0, 0], np.int64(sums.ctypes.data), np.int64(out.ctypes.data)
    whole = size - size % LANES
    for i in range(len(totals)):
        row, first = start + i // group, (head * group + i % group) * size
        source, to = sums_at + i * sums.strides[0], out_at + row * out.strides[0] + first * out.itemsize
        for d in range(0, whole, LANES):
            divide(element, source + d * F32_BYTES, totals[i], to + d * out.itemsize)
        for d in range(whole, size):
            out[row, first + d] = from_f32(element, sums[i, d] / totals[i])


@jit
def tokens_seen(position: Any, base: int, window: int) -> tuple[Any, Any]:
    """The tokens [low, high) of the tile that a vector sees."""
    low = max(position - window + 1 - base, 0) if window > 0 else 0
    return low, min(position + 1 - base, TILE)


@jit
def soften(scores: Any, low: Any, high: Any, vector: int, maxima: Any, totals: Any) -> Any:
    """Replace scores [low, high) of a vector by weights, and update its maximum and total. Returns the factor on
    earlier weights."""
    factor, peak = _ONE, max(maxima[vector], largest(scores, low, high))
    if maxima[vector] < peak:
        factor = exp32(maxima[vector] - peak) if maxima[vector] > MINUS_INFINITY else _ZERO
        maxima[vector] = peak
    totals[vector] = totals[vector] * factor + exponentials(scores, low, high, peak)
    return factor


@jit
def attend_tile(
    base: int, window: int, seen: Any, queries: Any, pairs: Any, keys: Any, values: Any, sums: Any, maxima: Any,
    totals: Any, scores: Any, factors: Any, edges: Any, scale: Any,
) -> None:  # fmt: skip
    """Add the tile of tokens [base, base + 64) to the `sums` [N, P], `maxima` [N] and `totals` [N] of all vectors.

    `seen` int64 [N]: the vectors' positions; each sees the last `window` tokens up to its own (0: all). queries [N, D],
    keys [D, 64] and values [64, P] are float32. Scratch space: `scores` [4, 64], `factors` [4], `edges` int64 [2, 4].
    Tokens that a vector does not see do not reach its sums. `pairs` [N, D], or [0, D]:
    bfloat16 to use instead of `queries`; scores are then multiplied by `scale`, and keys are bfloat16 [D / 2, 64, 2].
    """
    count, size, padded = queries.shape[0], queries.shape[1], values.shape[1]
    # Addresses of arguments only, which the caller keeps alive.
    keys_at, values_at, sums_at = np.int64(keys.ctypes.data), np.int64(values.ctypes.data), np.int64(sums.ctypes.data)
    scores_at, factors_at = np.int64(scores.ctypes.data), np.int64(factors.ctypes.data)
    queries_at, pairs_at = np.int64(queries.ctypes.data), np.int64(pairs.ctypes.data)
    score_bytes, sum_bytes, low, high = F32_BYTES * TILE, F32_BYTES * padded, edges[0], edges[1]
    for i in range(0, count, ROW_BLOCK):
        num_rows = min(ROW_BLOCK, count - i)
        # [first, last): the tokens that all of these vectors see.
        first, last, any_sees, all_see, ragged = 0, TILE, False, True, False
        for j in range(num_rows):
            low[j], high[j] = tokens_seen(seen[i + j], base, window)
            first, last = max(first, low[j]), min(last, high[j])
            any_sees, all_see = any_sees or low[j] < high[j], all_see and low[j] < high[j]
        if not any_sees:
            continue
        if HAS_BF16_PAIRS and len(pairs) > 0:
            _multiply_pairs(num_rows, pairs_at + i * size * 2, size * 2, keys_at, size // 2, scale, scores_at)
        else:
            left = queries_at + i * size * F32_BYTES
            multiply(num_rows, left, size * F32_BYTES, keys_at, score_bytes, size, 0, scores_at, score_bytes, TILE)
        if not all_see or first >= last:
            first, last = TILE, TILE
        for j in range(num_rows):
            if low[j] < high[j]:
                factors[j] = soften(scores_at + j * score_bytes, low[j], high[j], i + j, maxima, totals)
                ragged = ragged or low[j] < first or high[j] > last
        # Each vector sums its own tokens, in order. Masked ones are skipped: 0 times NaN or infinity would be NaN.
        for j in range(num_rows if ragged else 0):
            stop = min(first, high[j])
            if low[j] < stop:
                _add_own(j, low[j], stop, scores_at, values_at, factors_at, sums_at + (i + j) * sum_bytes, padded)
                factors[j] = _ONE
        if first < last:
            multiply(
                num_rows, scores_at + first * F32_BYTES, score_bytes, values_at + first * sum_bytes, sum_bytes,
                last - first, factors_at, sums_at + i * sum_bytes, sum_bytes, padded,
            )  # fmt: skip
        for j in range(num_rows if ragged else 0):
            factors[j] = _ONE
            if last < high[j]:
                _add_own(j, last, high[j], scores_at, values_at, factors_at, sums_at + (i + j) * sum_bytes, padded)

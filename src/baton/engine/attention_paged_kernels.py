"""Kernels of paged attention on the CPU: a row comes out with the same bits in every batch.

Online softmax (Milakov & Gimelshein, 2018) over tiles of 64 keys at ABSOLUTE positions 0, 64, 128, ... For
one row and head the sequence of floating-point operations depends on its position, its window and the head
size, on nothing else: not on the other rows, not on the chunk it came in, not on page size or page order.
Rows are blocked only to share the loaded tile.

Every kernel is a plain function of its module: what closes over another kernel would be compiled anew by each process.

Keys of a tile are transposed while they are loaded, so that scores of 64 keys are 64 independent lanes and
the sum over the head size runs in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.models.cpu_kernels import exp32, jit, jit_contract, to_f32

_TILE = 64
_ROW_BLOCK = 16
_ZERO = np.float32(0.0)
_MINUS_INFINITY = np.float32(-np.inf)


@jit
def write(kv: Any, layer: int, k: Any, v: Any, positions: Any, query_start: Any, page_table: Any) -> bool:
    """Store k and v [T, G, D] in their slots. Checks all slots before it writes; False: one is bad."""
    page_size = kv.shape[3]
    for r in range(len(query_start) - 1):
        for row in range(query_start[r], query_start[r + 1]):
            column = positions[row] // page_size
            if column < 0 or column >= page_table.shape[1]:
                return False
            page = page_table[r, column]
            if page <= 0 or page >= kv.shape[0]:
                return False
    heads, size = k.shape[1], k.shape[2]
    for r in range(len(query_start) - 1):
        for row in range(query_start[r], query_start[r + 1]):
            column = positions[row] // page_size
            page, slot = page_table[r, column], positions[row] - column * page_size
            for h in range(heads):
                for d in range(size):
                    kv[page, layer, 0, slot, h, d] = k[row, h, d]
                    kv[page, layer, 1, slot, h, d] = v[row, h, d]
    return True


@jit
def _load_tile(kv: Any, layer: int, head: int, pages: Any, first: int, last: int, keys: Any, values: Any) -> bool:
    """Tokens [first, last) of one tile as float32: keys [D, 64] transposed, values [64, D]. False: a bad page id."""
    page_size, size = kv.shape[3], kv.shape[5]
    token = first
    while token < last:
        column = token // page_size
        page = pages[column]
        if page < 0 or page >= kv.shape[0]:
            return False
        start = column * page_size
        end = min(start + page_size, last)
        while token < end:
            lane = token % _TILE
            for d in range(size):
                keys[d, lane] = to_f32(kv[page, layer, 0, token - start, head, d])
            for d in range(size):
                values[lane, d] = to_f32(kv[page, layer, 1, token - start, head, d])
            token += 1
    return True


@jit_contract
def _scores(query: Any, keys: Any, scale: Any, scores: Any) -> None:
    """scores [64] = scale * query [D] . keys [D, 64]; the sum over D runs in order, four steps per pass."""
    size = len(query)
    for j in range(_TILE):
        scores[j] = _ZERO
    whole = size - size % 4
    for d in range(0, whole, 4):
        q0, q1, q2, q3 = query[d] * scale, query[d + 1] * scale, query[d + 2] * scale, query[d + 3] * scale
        for j in range(_TILE):
            scores[j] = (((scores[j] + q0 * keys[d, j]) + q1 * keys[d + 1, j]) + q2 * keys[d + 2, j]) + q3 * keys[
                d + 3, j
            ]
    for d in range(whole, size):
        q0 = query[d] * scale
        for j in range(_TILE):
            scores[j] = scores[j] + q0 * keys[d, j]


@jit
def _softmax_step(scores: Any, first: int, last: int, maximum: Any, total: Any, fold: Any) -> Any:
    """Scores of visible lanes [first, last) become weights; returns (maximum, total, rescale of the past)."""
    peak = maximum
    for j in range(first, last):
        peak = max(peak, scores[j])
    for j in range(_TILE):
        weight = exp32(scores[j] - peak)
        weight = weight if first <= j < last else _ZERO
        scores[j] = weight
        fold[j] = weight
    half = _TILE // 2
    while half > 0:  # pairwise, so the order is fixed and the lanes stay parallel
        for j in range(half):
            fold[j] += fold[j + half]
        half //= 2
    rescale = exp32(maximum - peak) if maximum > _MINUS_INFINITY else _ZERO
    return peak, total * rescale + fold[0], rescale


@jit_contract
def _accumulate(weights: Any, values: Any, first: int, last: int, rescale: Any, out: Any) -> None:
    """out [D] = out * rescale + sum over lanes [first, last) of weights * values, in lane order."""
    size = len(out)
    for d in range(size):
        out[d] = out[d] * rescale
    whole = last - (last - first) % 4
    for j in range(first, whole, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(size):
            out[d] = (((out[d] + w0 * values[j, d]) + w1 * values[j + 1, d]) + w2 * values[j + 2, d]) + w3 * values[
                j + 3, d
            ]
    for j in range(whole, last):
        w0 = weights[j]
        for d in range(size):
            out[d] = out[d] + w0 * values[j, d]


@jit
def attend(
    kv: Any,
    layer: int,
    query: Any,
    out: Any,
    positions: Any,
    query_start: Any,
    page_table: Any,
    scale: Any,
    window: int,
    first_head: int,
    last_head: int,
) -> bool:
    """Fill out [T, H, D] for KV heads [first_head, last_head). window 0: none. False: a bad page id."""
    size, group = kv.shape[5], query.shape[1] // kv.shape[4]
    keys, values = np.zeros((size, _TILE), np.float32), np.zeros((_TILE, size), np.float32)
    scores, fold = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    maxima = np.empty((_ROW_BLOCK, group), np.float32)
    totals = np.empty((_ROW_BLOCK, group), np.float32)
    for r in range(len(query_start) - 1):
        for start in range(query_start[r], query_start[r + 1], _ROW_BLOCK):
            end = min(start + _ROW_BLOCK, query_start[r + 1])
            limit = positions[end - 1] + 1
            oldest = max(positions[start] - window + 1, 0) if window > 0 else 0
            if (limit - 1) // kv.shape[3] >= page_table.shape[1]:
                return False
            for head in range(first_head, last_head):
                maxima[:] = _MINUS_INFINITY
                totals[:] = _ZERO
                for row in range(start, end):
                    out[row, head * group : (head + 1) * group] = _ZERO
                for base in range(oldest // _TILE * _TILE, limit, _TILE):
                    begin, stop = max(base, oldest), min(base + _TILE, limit)
                    if not _load_tile(kv, layer, head, page_table[r], begin, stop, keys, values):
                        return False
                    for row in range(start, end):
                        position = positions[row]
                        low = max(position - window + 1 - base, 0) if window > 0 else 0
                        high = min(position + 1 - base, _TILE)
                        if low >= high:
                            continue
                        for g in range(group):
                            h = head * group + g
                            _scores(query[row, h], keys, scale, scores)
                            peak, total, rescale = _softmax_step(
                                scores, low, high, maxima[row - start, g], totals[row - start, g], fold
                            )
                            maxima[row - start, g] = peak
                            totals[row - start, g] = total
                            _accumulate(scores, values, low, high, rescale, out[row, h])
                for row in range(start, end):
                    for g in range(group):
                        total = totals[row - start, g]
                        for d in range(size):
                            out[row, head * group + g, d] = out[row, head * group + g, d] / total
    return True

"""Scores by which sparse attention chooses keys (DeepSeek-V3.2): a row's bits are the same in every batch.

Shapes: T rows, H index heads, D index head size, S keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.jit_cache import jit_contract
from baton.kernels.cpu.attention.online_softmax import F32_BYTES, ROW_BLOCK, TILE, multiply
from baton.kernels.cpu.scalar import to_f32
from baton.kernels.cpu.simd import LANES
from baton.kernels.cpu.transposes import transpose

_ZERO = np.float32(0.0)


@jit_contract
def _load_keys(plane: Any, pages: Any, base: int, count: int, keys: Any, rows: Any) -> bool:
    """`keys`: [D, 64]. `rows` int64 [16] is scratch space."""
    page_size, size = plane.shape[1], plane.shape[2]
    whole, element = size - size % LANES, plane[0, 0, 0]
    region, keys_at, rows_at = np.int64(plane.ctypes.data), np.int64(keys.ctypes.data), np.int64(rows.ctypes.data)
    for lane in range(0, count, LANES):
        for j in range(LANES):
            # Other lanes repeat the last key.
            token = base + min(lane + j, count - 1)
            column = token // page_size
            if column >= len(pages) or pages[column] <= 0 or pages[column] >= plane.shape[0]:
                return False
            slot = token - column * page_size
            rows[j] = region + pages[column] * plane.strides[0] + slot * plane.strides[1]
            for d in range(whole, size):
                keys[d, lane + j] = to_f32(plane[pages[column], slot, d])
        for d in range(0, whole, LANES):
            at = keys_at + (d * TILE + lane) * F32_BYTES
            transpose(element, rows_at, d * plane.itemsize, at, TILE * F32_BYTES)
    return True


@jit_contract
def _score_tile(queries: Any, weights: Any, keys: Any, dots: Any, sums: Any) -> None:
    """Of a row, for `keys` [D, 64]. `dots` [4, 64] is scratch space."""
    heads, size = queries.shape
    queries_at, keys_at = np.int64(queries.ctypes.data), np.int64(keys.ctypes.data)
    dots_at = np.int64(dots.ctypes.data)
    sums[:] = _ZERO
    for first in range(0, heads, ROW_BLOCK):
        count, left = min(ROW_BLOCK, heads - first), queries_at + first * size * F32_BYTES
        tile_bytes = TILE * F32_BYTES
        multiply(count, left, size * F32_BYTES, keys_at, tile_bytes, size, 0, dots_at, tile_bytes, TILE)
        for i in range(count):
            for j in range(TILE):
                # Not max(): a NaN stays one.
                sums[j] += weights[first + i] * (_ZERO if dots[i, j] < _ZERO else dots[i, j])


@jit_contract
def score(plane: Any, pages: Any, positions: Any, queries: Any, weights: Any, out: Any) -> bool:
    """Scores of one request's rows: the sum over heads of weight times relu(q k), to `out` float32 [T, S].

    `plane` [pages, page_size, D] holds the keys, `pages` int32 [columns] the request's page ids. `queries` float32 [T,
    H, D], `weights` float32 [T, H]. Row t sees keys 0 .. `positions`[t] (ascending); other scores stay. Returns False
    for a page id outside the plane, or the null page.
    """
    keys, rows = np.empty((plane.shape[2], TILE), np.float32), np.empty(LANES, np.int64)
    dots, sums = np.empty((ROW_BLOCK, TILE), np.float32), np.empty(TILE, np.float32)
    last = positions[len(positions) - 1] + 1
    for base in range(0, last, TILE):
        if not _load_keys(plane, pages, base, min(TILE, last - base), keys, rows):
            return False
        for t in range(len(positions)):
            seen = min(TILE, positions[t] + 1 - base)
            if seen > 0:
                _score_tile(queries[t], weights[t], keys, dots, sums)
                out[t, base : base + seen] = sums[:seen]
    return True

"""As `tiled`, with its bits, for a few rows of at most 8 query heads per KV head: decodes and verifications.

A group is one row, so that all of its vectors see the same tokens. Keys are read in their pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit
from baton.kernels.cpu.attention import few_softmax as softmax
from baton.kernels.cpu.attention.online_softmax import F32_BYTES, TILE, tokens_seen
from baton.kernels.cpu.attention.pages import read_ahead
from baton.kernels.cpu.attention.tiled import (
    ADDRESS,
    LOG2_E_F32,
    NARROW_BYTES,
    begin_scratch,
    group_places,
    load_tile,
    places,
    take_queries,
)
from baton.kernels.cpu.omp import pointer
from baton.kernels.cpu.simd import LANES
from baton.kernels.cpu.tiles import TILE_COLUMNS, end_tiles

MOST_ROWS, MOST_VECTORS = 2, 8
_FEW_VECTORS = 4
_ZERO = np.float32(0.0)


def _rows_of(vectors: int) -> Any:
    """Attention of rows with at most so many query heads per KV head."""

    @jit
    def attend_rows(
        at: Any, kv: Any, layer: int, head: int, base: int, group: int, start: int, end: int, positions: Any,
        pages: Any, factor: Any, window: int,
    ) -> bool:  # fmt: skip
        """The tile at `base` of one KV head; the groups of its rows begin with number `group`."""
        size, key_bytes = kv.shape[5], kv.strides[3] if kv.shape[3] % LANES == 0 else kv.shape[5] * NARROW_BYTES
        _, pairs, addresses_at, _, scores, weights, groups = places(at, size)
        addresses, score_bytes = carray(pointer(addresses_at, ADDRESS), (TILE // LANES,)), F32_BYTES * LANES * vectors
        # Of the loaded tokens. Rows that see fewer load theirs: 0 times an unseen NaN is NaN.
        first, last = 0, 0
        for row in range(start, end):
            low, high = tokens_seen(positions[row], base, window)
            if low >= high:
                continue
            if low != first or high != last:
                first, last = low, high
                if not load_tile(kv, layer, head, pages, base, base + first, base + last, at, True):
                    return False
            sums, queries, maxima, totals, _, faded = group_places(groups, group + row - start, size)
            for part in range(TILE // LANES):
                if addresses[part] != 0:
                    to = scores + part * score_bytes
                    softmax.score(vectors, addresses[part], key_bytes, queries, size // TILE_COLUMNS, to)
            if high - low == TILE:
                grows = softmax.soften(vectors, False, scores, factor, low, high - 1, maxima, totals, weights, faded)
            else:
                grows = softmax.soften(vectors, True, scores, factor, low, high - 1, maxima, totals, weights, faded)
            if grows:
                softmax.fade(vectors, sums, size, faded)
            softmax.add_values(vectors, pairs, weights, sums, size)
        return True

    return attend_rows


_attend_4, _attend_8 = _rows_of(_FEW_VECTORS), _rows_of(MOST_VECTORS)


@jit
def attend_few(
    scratch: Any, kv: Any, layer: int, head: int, num_heads: int, group: int, query: Any, out: Any, start: int,
    end: int, positions: Any, pages: Any, scale: Any, window: int, sinks: Any,
) -> bool:  # fmt: skip
    """As `paged._attend_block` for several KV heads, with the space of `scratch_for`."""
    size, factor, is_valid = kv.shape[5], scale * LOG2_E_F32, True
    at = begin_scratch(scratch, size)
    _, _, _, _, _, _, groups = places(at, size)
    vectors, num_rows = _FEW_VECTORS if group <= _FEW_VECTORS else MOST_VECTORS, end - start
    for number in range(num_heads * num_rows):
        place, row = group_places(groups, number, size)[0], start + number % num_rows
        take_queries(place, at, query, positions, sinks, row, head + number // num_rows, group, size, group, vectors)
    limit = positions[end - 1] + 1
    oldest = max(positions[start] - window + 1, 0) if window > 0 else 0
    if vectors == _FEW_VECTORS:
        softmax.begin_tiles(_FEW_VECTORS)
    else:
        softmax.begin_tiles(MOST_VECTORS)
    for base in range(oldest // TILE * TILE, limit, TILE):
        read_ahead(kv, layer, head, num_heads, pages, base, oldest, limit)
        for number in range(num_heads):
            given = at, kv, layer, head + number, base, number * num_rows, start, end, positions, pages, factor, window
            is_valid = is_valid and (_attend_4(*given) if vectors == _FEW_VECTORS else _attend_8(*given))
    end_tiles()
    for number in range(num_heads * num_rows if is_valid else 0):
        sums, _, _, totals, _, _ = group_places(groups, number, size)
        _store_means(sums, totals, start + number % num_rows, head + number // num_rows, group, size, out)
    return is_valid


@jit
def _store_means(sums: Any, totals_at: Any, row: int, head: int, group: int, size: int, out: Any) -> None:
    totals = carray(pointer(totals_at, _ZERO), (LANES,))
    to = np.int64(out.ctypes.data) + row * out.strides[0] + head * group * size * out.itemsize
    for vector in range(group):
        softmax.divide(sums + vector * size * F32_BYTES, size, totals[vector], to + vector * size * out.itemsize)

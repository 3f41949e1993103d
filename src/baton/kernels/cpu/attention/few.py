"""As `tiled`, with its bits, for a few rows of at most 16 queries per KV head: decodes and verifications.

A KV head's queries are one group. Keys are read in their pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit
from baton.kernels.cpu.attention import few_softmax as softmax
from baton.kernels.cpu.attention.online_softmax import F32_BYTES, TILE
from baton.kernels.cpu.attention.pages import copy_keys, find_keys, page_at, read_ahead
from baton.kernels.cpu.attention.tiled import (
    ADDRESS,
    LOG2_E_F32,
    NARROW_BYTES,
    SCORE_BYTES,
    begin_scratch,
    group_places,
    places,
    take_queries,
)
from baton.kernels.cpu.attention.tiled_softmax import STEPS, are_finite
from baton.kernels.cpu.omp import pointer
from baton.kernels.cpu.simd import LANES, LINE_BYTES
from baton.kernels.cpu.tiles import TILE_COLUMNS, end_tiles

# Vectors of a KV head: sums of all rows together.
MOST_VECTORS = LANES
_ZERO = np.float32(0.0)


@jit
def _pairs_at(at: Any, size: int, unit: int) -> Any:
    """A unit is a tile of a KV head."""
    _, pairs, others, _, _, _, _ = places(at, size)
    return pairs if unit % 2 == 0 else others


@jit
def _interleave_part(
    at: Any, values: Any, row_bytes: int, rows: Any, begin: int, first: int, last: int, size: int, to: Any
) -> None:
    """16 tokens' values, zeros outside [first, last): at `values`, `row_bytes` apart (0: so far after `rows`)."""
    zeros = places(at, size)[3]
    for j in range(0, LANES, 2):
        even = odd = zeros
        if first <= begin + j < last:
            even = values + (j * row_bytes if row_bytes else rows[j])
        if first <= begin + j + 1 < last:
            odd = values + ((j + 1) * row_bytes if row_bytes else rows[j + 1])
        softmax.interleave(even, odd, size, to + j * size * NARROW_BYTES)


def _preparing(vectors: int) -> Any:
    score_bytes = F32_BYTES * LANES * vectors

    @jit
    def prepare(
        at: Any, kv: Any, layer: int, head: int, pages: Any, base: int, first: int, last: int, queries: Any, unit: int
    ) -> bool:
        """Values of tokens [first, last), and scores; others' are undefined."""
        size, page_size, rows = kv.shape[5], kv.shape[3], carray(pointer(at, ADDRESS), (LANES,))
        keys, _, _, zeros, scores, _, _ = places(at, size)
        pairs, to_value, row_bytes = _pairs_at(at, size, unit), kv.strides[2], size * NARROW_BYTES
        steps = (last - base + TILE_COLUMNS - 1) // TILE_COLUMNS
        of_head = np.int64(kv.ctypes.data) + layer * kv.strides[1] + head * kv.strides[4]
        for part in range(TILE_COLUMNS // LANES * steps):
            begin = base + part * LANES
            to = pairs + part * LANES * row_bytes
            if begin >= last or begin + LANES <= first:
                _interleave_part(at, zeros, 0, rows, begin, 0, 0, size, to)
                continue
            score = scores + unit % 2 * SCORE_BYTES + part * score_bytes
            if page_size % LANES == 0:
                page = page_at(kv, begin, pages)
                if page == 0:
                    return False
                here = of_head + page * kv.strides[0] + begin % page_size * kv.strides[3]
                softmax.score(vectors, here, kv.strides[3], queries, size // TILE_COLUMNS, score)
                if first <= begin and begin + LANES <= last:
                    softmax.interleave_block(here + to_value, kv.strides[3], size, to)
                else:
                    _interleave_part(at, here + to_value, kv.strides[3], rows, begin, first, last, size, to)
                continue
            if not find_keys(kv, layer, head, pages, begin, first, last, rows):
                return False
            copy_keys(rows, row_bytes, keys)
            softmax.score(vectors, keys, row_bytes, queries, size // TILE_COLUMNS, score)
            _interleave_part(at, to_value, 0, rows, begin, first, last, size, to)
        return True

    return prepare


def _attending(vectors: int) -> Any:
    prepare = _preparing(vectors)

    @jit
    def attend(
        at: Any, kv: Any, layer: int, head: int, num_heads: int, start: int, end: int, positions: Any, pages: Any,
        factor: Any, window: int, used: int,
    ) -> bool:  # fmt: skip
        """A unit is prepared while the one before is added."""
        size, oldest, limit = kv.shape[5], positions[start], positions[end - 1] + 1
        _, _, _, _, scores, weights, groups = places(at, size)
        oldest = max(oldest - window + 1, 0) if window > 0 else 0
        first_base = oldest // TILE * TILE
        softmax.begin_tiles(vectors, used)
        num_units, is_valid = (limit - first_base + TILE - 1) // TILE * num_heads, True
        for unit in range(-1, num_units):
            base, number = first_base + unit // num_heads * TILE, unit % num_heads
            sums, _, maxima, totals, seen, faded = group_places(groups, number, size)
            steps, grows = min(STEPS, (limit - base + TILE_COLUMNS - 1) // TILE_COLUMNS), False
            if unit >= 0:
                here = scores + unit % 2 * SCORE_BYTES
                if positions[start] >= base + TILE - 1 and (window == 0 or limit - window <= base):
                    grows = softmax.soften(
                        vectors, False, steps, here, factor, seen, 0, 0, maxima, totals, weights, faded
                    )
                else:
                    grows = softmax.soften(
                        vectors, True, steps, here, factor, seen, base, window, maxima, totals, weights, faded
                    )
            if unit + 1 < num_units:
                later, other = first_base + (unit + 1) // num_heads * TILE, (unit + 1) % num_heads
                if other == 0:
                    read_ahead(kv, layer, head, num_heads, pages, later, oldest, limit)
                is_valid = is_valid and prepare(
                    at, kv, layer, head + other, pages, later, max(later, oldest), min(later + TILE, limit),
                    group_places(groups, other, size)[1], unit + 1,
                )  # fmt: skip
            if not is_valid:
                break
            if grows:
                softmax.fade(vectors, sums, size, faded)
            if unit >= 0:
                if steps == 1:
                    softmax.add_values(vectors, 1, _pairs_at(at, size, unit), weights, sums, size)
                else:
                    softmax.add_values(vectors, STEPS, _pairs_at(at, size, unit), weights, sums, size)
        end_tiles()
        return is_valid

    return attend


_attend_4, _attend_8, _attend_16 = _attending(4), _attending(8), _attending(16)


@jit
def attend_few(
    scratch: Any, kv: Any, layer: int, head: int, num_heads: int, group: int, query: Any, out: Any, start: int,
    end: int, positions: Any, pages: Any, scale: Any, window: int, sinks: Any,
) -> bool:  # fmt: skip
    """As `paged._attend_block` for several KV heads, with the space of `scratch_for`."""
    # 0 times an unseen NaN is NaN.
    at_once = end - start if _are_finite(kv, layer, head, num_heads, start, end, positions, pages, window) else 1
    size, factor, count, is_valid = kv.shape[5], scale * LOG2_E_F32, at_once * group, True
    at = begin_scratch(scratch, size)
    groups = places(at, size)[6]
    vectors = 4 if count <= 4 else 8 if count <= 8 else MOST_VECTORS
    for row in range(start, end, at_once):
        for number in range(num_heads):
            place = group_places(groups, number, size)[0]
            take_queries(place, at, query, positions, sinks, row, head + number, group, size, count, vectors)
        given = at, kv, layer, head, num_heads, row, row + at_once, positions, pages, factor, window, count
        if vectors == 4:
            is_valid = is_valid and _attend_4(*given)
        elif vectors == 8:
            is_valid = is_valid and _attend_8(*given)
        else:
            is_valid = is_valid and _attend_16(*given)
        for number in range(num_heads if is_valid else 0):
            sums, _, _, totals, _, _ = group_places(groups, number, size)
            for of_block in range(at_once):
                _store_means(sums, totals, of_block, row, head + number, group, size, out)
    return is_valid


@jit
def _are_finite(
    kv: Any, layer: int, head: int, num_heads: int, start: int, end: int, positions: Any, pages: Any, window: int
) -> bool:
    """Whether values are that only some rows see."""
    oldest, newest = positions[start], positions[end - 1]
    if not _are_values_finite(kv, layer, head, num_heads, oldest + 1, newest + 1, pages):
        return False
    if window == 0:
        return True
    return _are_values_finite(
        kv, layer, head, num_heads, max(oldest - window + 1, 0), min(max(newest - window + 1, 0), oldest + 1), pages
    )


@jit
def _are_values_finite(kv: Any, layer: int, head: int, num_heads: int, first: int, last: int, pages: Any) -> bool:
    num_lines = num_heads * kv.strides[4] // LINE_BYTES
    for token in range(first, last):
        page = page_at(kv, token, pages)
        at = np.int64(kv.ctypes.data) + page * kv.strides[0] + layer * kv.strides[1] + head * kv.strides[4]
        at += kv.strides[2] + token % kv.shape[3] * kv.strides[3]
        if page != 0 and not are_finite(at, num_lines):
            return False
    return True


@jit
def _store_means(
    sums: Any, totals_at: Any, of_block: int, start: int, head: int, group: int, size: int, out: Any
) -> None:
    totals = carray(pointer(totals_at, _ZERO), (LANES,))
    to = np.int64(out.ctypes.data) + (start + of_block) * out.strides[0] + head * group * size * out.itemsize
    for number in range(group):
        vector = of_block * group + number
        softmax.divide(sums + vector * size * F32_BYTES, size, totals[vector], to + number * size * out.itemsize)

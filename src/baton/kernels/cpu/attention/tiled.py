"""Paged attention of one KV head's queries in tiles of Intel AMX (see `tiled_softmax`): bfloat16, D a multiple of 32.

Vectors, 16 to a group: the queries of a row's heads, then those of the next row. Keys are used as they lie; values and
queries are transposed when they are loaded, and sums when they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit
from baton.kernels.cpu.attention.online_softmax import F32_BYTES, MINUS_INFINITY, TILE
from baton.kernels.cpu.attention.pages import copy_keys, find_keys, read_ahead
from baton.kernels.cpu.attention.tiled_softmax import (
    LOG2_E,
    WEIGHT_BYTES,
    add_values,
    are_finite,
    fade,
    interleave,
    score,
    soften,
)
from baton.kernels.cpu.omp import pointer
from baton.kernels.cpu.simd import LANES, LINE_BYTES
from baton.kernels.cpu.tiles import TILE_COLUMNS, TILE_ROWS, begin_tiles, end_tiles
from baton.kernels.cpu.transposes import divide, transpose

NARROW_BYTES, _ADDRESS_BYTES = 2, 8
SCORE_BYTES, _VALUE_BYTES = TILE * LINE_BYTES, TILE * NARROW_BYTES
_ZERO, _ONE, ADDRESS, NARROW = np.float32(0.0), np.float32(1.0), np.int64(0), np.uint16(0)
LOG2_E_F32 = np.float32(LOG2_E)


@jit
def places(at: Any, size: int) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """The parts of the scratch space after 16 addresses: keys [64, D], values in pairs [32, D, 2] and transposed [D,
    64], a row of zeros, two groups' scores [64, 16] and weights [2, 32, 16, 2], and the groups."""
    row = size * NARROW_BYTES
    keys = at + LANES * _ADDRESS_BYTES
    zeros = keys + 3 * TILE * row
    scores = zeros + row
    weights = scores + 2 * SCORE_BYTES
    return keys, keys + TILE * row, keys + 2 * TILE * row, zeros, scores, weights, weights + 2 * WEIGHT_BYTES


@jit
def group_places(groups: Any, number: int, size: int) -> tuple[Any, Any, Any, Any, Any, Any]:
    """A group's sums [D, 16], queries [D / 2, 16, 2], maxima, totals, positions and latest factors [16]."""
    sums = groups + number * (size + size // 2 + 4) * LINE_BYTES
    queries = sums + size * LINE_BYTES
    maxima = queries + size // 2 * LINE_BYTES
    return sums, queries, maxima, maxima + LINE_BYTES, maxima + 2 * LINE_BYTES, maxima + 3 * LINE_BYTES


@jit
def scratch_for(size: int, groups: int) -> Any:
    """Scratch space of blocks with at most so many groups."""
    return np.empty(LINE_BYTES + group_places(places(0, size)[6], groups, size)[0], np.uint8)


@jit
def take_queries(
    groups: Any, rows_at: Any, query: Any, positions: Any, sinks: Any, start: int, head: int, group: int, size: int,
    count: int, at_once: int,
) -> None:  # fmt: skip
    """Lane i of a group is vector i % `at_once` of it. Vectors that there are not repeat the last one."""
    rows, query_at = carray(pointer(rows_at, ADDRESS), (LANES,)), np.int64(query.ctypes.data)
    for number in range((count + at_once - 1) // at_once):
        sums_at, queries_at, maxima_at, totals_at, seen_at, _ = group_places(groups, number, size)
        maxima, totals = carray(pointer(maxima_at, _ZERO), (LANES,)), carray(pointer(totals_at, _ZERO), (LANES,))
        seen, sums = carray(pointer(seen_at, np.int32(0)), (LANES,)), carray(pointer(sums_at, _ZERO), (size * LANES,))
        sums[:] = _ZERO
        for lane in range(LANES):
            i = min(number * at_once + lane % at_once, count - 1)
            row, of_head = start + i // group, head * group + i % group
            seen[lane], rows[lane] = positions[row], query_at + row * query.strides[0] + of_head * size * NARROW_BYTES
            maxima[lane], totals[lane] = MINUS_INFINITY, _ZERO
            if len(sinks):
                # A sink is a logit without a value, summed before the first tile.
                maxima[lane], totals[lane] = sinks[of_head] * LOG2_E_F32, _ONE
        for d in range(0, size // 2, LANES):
            transpose(_ZERO, rows_at, d * F32_BYTES, queries_at + d * LINE_BYTES, LINE_BYTES)


@jit
def begin_scratch(scratch: Any, size: int) -> Any:
    """The address of `scratch_for`'s space."""
    at = np.int64(scratch.ctypes.data)
    at += -at % LINE_BYTES
    zeros = carray(pointer(places(at, size)[3], NARROW), (size,))
    zeros[:] = NARROW
    return at


@jit
def _load_tile(kv: Any, layer: int, head: int, pages: Any, base: int, first: int, last: int, at: Any) -> bool:
    """Load tokens [first, last) of the tile at `base`: keys, and values in pairs. Other tokens' values are zeros, their
    keys undefined. Returns False for a bad page id."""
    size, rows = kv.shape[5], carray(pointer(at, ADDRESS), (LANES,))
    keys, pairs, _, zeros, _, _, _ = places(at, size)
    row_bytes, pair_bytes, to_value = size * NARROW_BYTES, size * 2 * NARROW_BYTES, kv.strides[2]
    for lane in range(0, TILE, LANES):
        begin = base + lane
        if begin < last and begin + LANES > first:
            if not find_keys(kv, layer, head, pages, begin, first, last, rows):
                return False
            copy_keys(rows, row_bytes, keys + lane * row_bytes)
        for j in range(0, LANES, 2):
            even = rows[j] + to_value if first <= begin + j < last else zeros
            odd = rows[j + 1] + to_value if first <= begin + j + 1 < last else zeros
            interleave(even, odd, size, pairs + (lane + j) // 2 * pair_bytes)
    return True


@jit
def _transpose_values(at: Any, size: int) -> None:
    rows, pair_bytes = carray(pointer(at, ADDRESS), (LANES,)), size * 2 * NARROW_BYTES
    _, pairs, values, _, _, _, _ = places(at, size)
    for half in range(0, TILE // 2, LANES):
        for j in range(LANES):
            rows[j] = pairs + (half + j) * pair_bytes
        for d in range(0, size, LANES):
            transpose(_ZERO, at, d * F32_BYTES, values + d * _VALUE_BYTES + half * F32_BYTES, _VALUE_BYTES)


@jit
def _attend_whole(at: Any, size: int, num_groups: int, factor: Any) -> None:
    """All vectors see the tile. Tiles are multiplied while the weights of another group are computed."""
    keys, _, values, _, scores, weights, groups = places(at, size)
    steps = size // TILE_COLUMNS
    score(keys, group_places(groups, 0, size)[1], steps, scores)
    for number in range(num_groups):
        sums, _, maxima, totals, seen, faded = group_places(groups, number, size)
        here, there = number % 2, (number + 1) % 2
        if number + 1 < num_groups:
            score(keys, group_places(groups, number + 1, size)[1], steps, scores + there * SCORE_BYTES)
        if number > 0:
            add_values(values, weights + there * WEIGHT_BYTES, group_places(groups, number - 1, size)[0], size)
        if soften(
            False, scores + here * SCORE_BYTES, factor, seen, 0, 0, maxima, totals, weights + here * WEIGHT_BYTES,
            faded,
        ):  # fmt: skip
            fade(sums, size, faded)
    last = num_groups - 1
    add_values(values, weights + last % 2 * WEIGHT_BYTES, group_places(groups, last, size)[0], size)


@jit
def _attend_part(at: Any, size: int, number: int, base: int, window: int, factor: Any, is_finite: bool) -> None:
    """A group whose vectors see a part of the tile each."""
    keys, _, values, _, scores, weights, groups = places(at, size)
    sums, queries, maxima, totals, seen, faded = group_places(groups, number, size)
    score(keys, queries, size // TILE_COLUMNS, scores)
    if soften(True, scores, factor, seen, base, window, maxima, totals, weights, faded):
        fade(sums, size, faded)
    if is_finite:
        add_values(values, weights, sums, size)
        return
    # 0 times an unseen NaN is NaN: each vector gets the values that it sees.
    copy, others = np.empty((size, TILE), np.uint16), np.empty((size, LANES), np.float32)
    positions = carray(pointer(seen, np.int32(0)), (LANES,))
    for lane in range(LANES):
        last = positions[lane] - base
        first = last - window + 1 if window > 0 else 0
        _add_seen(values, weights, sums, size, lane, first, last, copy, others)


@jit
def _add_seen(
    values: Any, weights: Any, sums: Any, size: int, lane: int, first: int, last: int, copy: Any, others: Any
) -> None:
    """Add the values of keys [first, last] to one lane of sums. `copy` [D, 64] and `others` [D, 16] are scratch."""
    all_values, all_sums = carray(pointer(values, NARROW), copy.shape), carray(pointer(sums, _ZERO), others.shape)
    for d in range(size):
        for key in range(TILE):
            copy[d, key] = all_values[d, key] if first <= key <= last else NARROW
        for other in range(LANES):
            others[d, other] = all_sums[d, other]
    add_values(np.int64(copy.ctypes.data), weights, np.int64(others.ctypes.data), size)
    for d in range(size):
        all_sums[d, lane] = others[d, lane]


@jit
def _store_means(groups: Any, at: Any, out: Any, start: int, head: int, group: int, size: int, count: int) -> None:
    rows, out_at = carray(pointer(at, ADDRESS), (LANES,)), np.int64(out.ctypes.data)
    turned, row_bytes, element = places(at, size)[0], size * F32_BYTES, out[0, 0]
    for number in range((count + LANES - 1) // LANES):
        sums, _, _, totals_at, _, _ = group_places(groups, number, size)
        totals = carray(pointer(totals_at, _ZERO), (LANES,))
        for d in range(0, size, LANES):
            for j in range(LANES):
                rows[j] = sums + (d + j) * LINE_BYTES
            transpose(_ZERO, at, 0, turned + d * F32_BYTES, row_bytes)
        for lane in range(min(LANES, count - number * LANES)):
            i = number * LANES + lane
            row, first = start + i // group, (head * group + i % group) * size
            to = out_at + row * out.strides[0] + first * out.itemsize
            for d in range(0, size, LANES):
                divide(element, turned + lane * row_bytes + d * F32_BYTES, totals[lane], to + d * out.itemsize)


@jit
def attend_in_tiles(
    scratch: Any, kv: Any, layer: int, head: int, ahead: int, group: int, query: Any, out: Any, start: int, end: int,
    positions: Any, pages: Any, scale: Any, window: int, sinks: Any,
) -> bool:  # fmt: skip
    """As `paged._attend_block`, with the space of `scratch_for`."""
    size, count = kv.shape[5], (end - start) * group
    at = begin_scratch(scratch, size)
    _, pairs, _, _, _, _, groups = places(at, size)
    num_groups, factor, is_valid = (count + LANES - 1) // LANES, scale * LOG2_E_F32, True
    take_queries(groups, at, query, positions, sinks, start, head, group, size, count, LANES)
    limit = positions[end - 1] + 1
    oldest = max(positions[start] - window + 1, 0) if window > 0 else 0
    begin_tiles(TILE_ROWS)
    for base in range(oldest // TILE * TILE, limit, TILE):
        read_ahead(kv, layer, head, ahead, pages, base, oldest, limit)
        first, last = max(base, oldest), min(base + TILE, limit)
        is_valid = is_valid and _load_tile(kv, layer, head, pages, base, first, last, at)
        if not is_valid:
            break
        _transpose_values(at, size)
        if positions[start] >= base + TILE - 1 and (window == 0 or limit - window <= base):
            _attend_whole(at, size, num_groups, factor)
            continue
        is_finite = end - start == 1 or are_finite(pairs, 2 * size)
        for number in range(num_groups):
            oldest_row, newest_row = start + number * LANES // group, start + (number * LANES + LANES - 1) // group
            newest = positions[min(newest_row, end - 1)]
            if newest >= base and (window == 0 or positions[oldest_row] - window < base + TILE):
                _attend_part(at, size, number, base, window, factor, is_finite)
    end_tiles()
    if is_valid:
        _store_means(groups, at, out, start, head, group, size, count)
    return is_valid

"""CPU kernels of paged attention, batch-invariant.

Tiles of 64 keys at ABSOLUTE positions go through `online_softmax`. For one row and head, the sequence of floating-point
operations depends only on its position, its window and the head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit, jit_inline
from baton.kernels.cpu.attention.few import MOST_VECTORS, attend_few
from baton.kernels.cpu.attention.online_softmax import (
    F32_BYTES,
    MINUS_INFINITY,
    ROW_BLOCK,
    TILE,
    attend_tile,
    from_a_line,
    store_means,
    take_queries,
)
from baton.kernels.cpu.attention.pages import are_valid_slots, find_keys, page_of, read_ahead
from baton.kernels.cpu.attention.tiled import attend_in_tiles, scratch_for
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS
from baton.kernels.cpu.omp import Kernel, float_of, pointer, take
from baton.kernels.cpu.scalar import to_f32
from baton.kernels.cpu.simd import LANES, LINE_BYTES
from baton.kernels.cpu.tiles import HAS_TILES, TILE_COLUMNS
from baton.kernels.cpu.transposes import transpose, widen

# Query vectors that share one load of a tile: they fit in a core's cache. AMX takes more, if that leaves enough pieces.
_QUERY_VECTORS, _MOST_QUERY_VECTORS, _MIN_PIECES = 128, 256, 16
# With this many requests, threads share the work well without splitting a request's heads.
_MIN_REQUESTS = 4
_ZERO = np.float32(0.0)
# Arguments of WRITE and ATTEND, after the counter of `take`. Names of arrays stand for addresses. FAULT starts as 0.
NUM_ARGUMENTS = 25
(
    FAULT,
    _ROWS,
    _REQUESTS,
    _COLUMNS,
    _WIDTH,
    _KV,
    _PAGES,
    _LAYERS,
    _PAGE_SIZE,
    _HEADS,
    _SIZE,
    _LAYER,
    _GROUP,
    _WINDOW,
    _SCALE,
    _POSITIONS,
    _QUERY_START,
    _PAGE_TABLE,
    _QUERIES,
    _KEYS,
    _VALUES,
    _OUT,
    _SINKS,
    _TILES,
) = range(1, NUM_ARGUMENTS)


@jit
def write_row(kv: Any, layer: int, page: int, slot: int, k: Any, v: Any) -> None:
    """Store a row's keys and values [G * D or more]."""
    heads, size = kv.shape[4], kv.shape[5]
    for h in range(heads):
        for d in range(size):
            kv[page, layer, 0, slot, h, d] = k[h * size + d]
            kv[page, layer, 1, slot, h, d] = v[h * size + d]


@jit_inline
def _write(kv: Any, layer: int, k: Any, v: Any, positions: Any, query_start: Any, page_table: Any) -> bool:
    """Store k and v [T, G * D or more] in their slots. Returns False, before it writes, for a bad slot."""
    if not are_valid_slots(kv, positions, query_start, page_table):
        return False
    for r in range(len(query_start) - 1):
        for row in range(query_start[r], query_start[r + 1]):
            page = page_of(kv, positions[row], page_table[r])
            write_row(kv, layer, page, positions[row] % kv.shape[3], k[row], v[row])
    return True


@jit
def _load_tile(
    kv: Any, layer: int, head: int, pages: Any, base: int, first: int, last: int, keys: Any, values: Any, rows: Any,
    in_pairs: bool,
) -> bool:  # fmt: skip
    """Load tokens [first, last) of the tile at `base` as float32: keys [D, 64], transposed, and values [64, D].

    `in_pairs`: keys stay bfloat16, [D / 2, 64, 2]. `rows` int64 [16] is scratch for addresses. Other lanes are
    undefined. Returns False for a bad page id.
    """
    size, element = kv.shape[5], kv[0, 0, 0, 0, 0, 0]
    whole, to_value = size - size % LANES, kv.strides[2]
    key_bytes, value_bytes = F32_BYTES * TILE, F32_BYTES * values.shape[1]
    values_at, keys_at, rows_at = np.int64(values.ctypes.data), np.int64(keys.ctypes.data), np.int64(rows.ctypes.data)
    for lane in range((first - base) // LANES * LANES, last - base, LANES):
        if not find_keys(kv, layer, head, pages, base + lane, first, last, rows):
            return False
        for j in range(LANES):
            at = values_at + (lane + j) * value_bytes
            for d in range(0, whole, LANES):
                widen(element, rows[j] + to_value + d * kv.itemsize, at + d * F32_BYTES)
            key, value = (
                carray(pointer(rows[j], element), (size,)),
                carray(pointer(rows[j] + to_value, element), (size,)),
            )
            for d in range(whole, size):
                keys[d, lane + j], values[lane + j, d] = to_f32(key[d]), to_f32(value[d])
        if in_pairs:
            for d in range(0, size // 2, LANES):
                transpose(_ZERO, rows_at, d * F32_BYTES, keys_at + d * key_bytes + lane * F32_BYTES, key_bytes)
        else:
            for d in range(0, whole, LANES):
                transpose(element, rows_at, d * kv.itemsize, keys_at + d * key_bytes + lane * F32_BYTES, key_bytes)
    return True


@jit
def _attend_block(
    kv: Any, layer: int, head: int, ahead: int, group: int, query: Any, out: Any, start: int, end: int, positions: Any,
    pages: Any, scale: Any, window: int, sinks: Any,
) -> bool:  # fmt: skip
    """Compute out for rows [start, end) of one request and the query heads of one KV head. Returns False for a bad
    page id. `ahead`: the heads, from this one on, that are read ahead.
    """
    size = kv.shape[5]
    padded, count = (size + LANES - 1) // LANES * LANES, (end - start) * group
    keys = from_a_line(np.empty(size * TILE + LINE_BYTES, np.float32), size * TILE).reshape(size, TILE)
    values = np.empty((TILE, padded), np.float32)
    queries, sums = np.empty((count, size), np.float32), np.zeros((count, padded), np.float32)
    maxima, totals = np.full(count, MINUS_INFINITY), np.zeros(count, np.float32)
    scores, factors = np.empty((ROW_BLOCK, TILE), np.float32), np.empty(ROW_BLOCK, np.float32)
    rows, edges, seen = np.empty(LANES, np.int64), np.empty((2, ROW_BLOCK), np.int64), np.empty(count, np.int64)
    # If the pairs fill whole vectors.
    in_pairs = HAS_BF16_PAIRS and kv.itemsize == 2 and size % (2 * LANES) == 0
    pairs = np.empty((count if in_pairs else 0, size), query.dtype)
    take_queries(query, positions, sinks, start, head, group, scale, seen, queries, pairs, maxima, totals)
    # Padding columns, which no row reads, stay finite.
    values[:, size:] = _ZERO
    limit = positions[end - 1] + 1
    oldest = max(positions[start] - window + 1, 0) if window > 0 else 0
    for base in range(oldest // TILE * TILE, limit, TILE):
        read_ahead(kv, layer, head, ahead, pages, base, oldest, limit)
        first, last = max(base, oldest), min(base + TILE, limit)
        if not _load_tile(kv, layer, head, pages, base, first, last, keys, values, rows, in_pairs):
            return False
        attend_tile(
            base, window, seen, queries, pairs, keys, values, sums, maxima, totals, scores, factors, edges, scale
        )
    store_means(sums, totals, start, head, group, size, out)
    return True


@jit
def attend_pieces(
    counter: Any, kv: Any, layer: int, group: int, window: int, query: Any, out: Any, positions: Any, query_start: Any,
    page_table: Any, scale: Any, sinks: Any, tiles: int | None,
) -> tuple[int, int, bool]:  # fmt: skip
    """Attend the pieces that this thread takes from `counter`. Returns the number of all pieces, that of this thread's,
    and whether all page ids were good. `tiles`: None for float32."""
    num_requests, num_rows, heads = len(query_start) - 1, len(positions), kv.shape[4]
    in_tiles = False
    if HAS_TILES and tiles is not None:
        in_tiles = tiles != 0 and kv.shape[5] % TILE_COLUMNS == 0
    has_enough = in_tiles and num_rows * group * heads >= _MIN_PIECES * _MOST_QUERY_VECTORS
    step = max(1, (_MOST_QUERY_VECTORS if has_enough else _QUERY_VECTORS) // group)
    # Longest pieces first, so that threads finish together. The heads of a few rows are one piece, since their keys and
    # values are contiguous; with few requests, threads share the heads.
    are_few = num_rows < 2 * num_requests or (in_tiles and num_rows * group <= MOST_VECTORS * num_requests)
    heads_per_piece = heads if num_requests >= _MIN_REQUESTS and are_few else 1
    mine, number, taken, is_valid = take(counter), 0, 0, True
    scratch = np.empty(0, np.uint8)
    if HAS_TILES and tiles is not None and in_tiles:
        longest = 0
        for r in range(num_requests):
            longest = max(longest, query_start[r + 1] - query_start[r])
        groups = (min(longest, step) * group + LANES - 1) // LANES
        scratch = scratch_for(kv.shape[5], max(groups, heads_per_piece))
    for r in range(num_requests - 1, -1, -1):
        begin, stop = query_start[r], query_start[r + 1]
        for block in range((stop - begin + step - 1) // step - 1, -1, -1):
            start = begin + block * step
            end = min(start + step, stop)
            is_few = in_tiles and group * (end - start) <= MOST_VECTORS
            for first in range(0, heads, heads_per_piece):
                if number == mine:
                    is_valid = is_valid and positions[end - 1] // kv.shape[3] < page_table.shape[1]
                    if HAS_TILES and tiles is not None and is_few:
                        is_valid = is_valid and attend_few(
                            scratch, kv, layer, first, heads_per_piece, group, query, out, start, end, positions,
                            page_table[r], scale, window, sinks,
                        )  # fmt: skip
                    for head in range(first, first if is_few else first + heads_per_piece):
                        ahead = heads_per_piece if head == first else 0
                        if HAS_TILES and tiles is not None and in_tiles:
                            is_valid = is_valid and attend_in_tiles(
                                scratch, kv, layer, head, ahead, group, query, out, start, end, positions,
                                page_table[r], scale, window, sinks,
                            )  # fmt: skip
                        else:
                            is_valid = is_valid and _attend_block(
                                kv, layer, head, ahead, group, query, out, start, end, positions, page_table[r], scale,
                                window, sinks,
                            )  # fmt: skip
                    taken += 1
                    mine = take(counter)
                number += 1
    return number, taken, is_valid


@jit_inline
def _region(a: Any, element: Any) -> Any:
    """The group's keys and values [pages, layers, 2, page_size, G, D]."""
    return carray(pointer(a[_KV], element), (a[_PAGES], a[_LAYERS], 2, a[_PAGE_SIZE], a[_HEADS], a[_SIZE]))


@jit_inline
def _batch(a: Any) -> Any:
    """Positions, query starts and page table, as in `AttnBatch`."""
    num_requests = a[_REQUESTS]
    return (
        carray(pointer(a[_POSITIONS], np.int64(0)), (a[_ROWS],)),
        carray(pointer(a[_QUERY_START], np.int32(0)), (num_requests + 1,)),
        carray(pointer(a[_PAGE_TABLE], np.int32(0)), (num_requests, a[_COLUMNS])),
    )


@jit_inline
def _write_step(arguments: Any, element: Any) -> None:
    a = carray(arguments, NUM_ARGUMENTS)
    positions, query_start, page_table = _batch(a)
    # Queries, keys and values are parts of the same rows.
    shape = (a[_ROWS], a[_WIDTH])
    k, v = carray(pointer(a[_KEYS], element), shape), carray(pointer(a[_VALUES], element), shape)
    if not _write(_region(a, element), a[_LAYER], k, v, positions, query_start, page_table):
        a[FAULT] = 1


@jit_inline
def _attend_step(arguments: Any, element: Any, tiles: int | None) -> None:
    a = carray(arguments, NUM_ARGUMENTS)
    positions, query_start, page_table = _batch(a)
    kv, layer, group, window = _region(a, element), a[_LAYER], a[_GROUP], a[_WINDOW]
    heads = a[_HEADS]
    query = carray(pointer(a[_QUERIES], element), (a[_ROWS], a[_WIDTH]))
    out = carray(pointer(a[_OUT], element), (a[_ROWS], heads * group * a[_SIZE]))
    # float32 [H], or empty.
    sinks = carray(pointer(a[_SINKS], _ZERO), (heads * group if a[_SINKS] else 0,))
    _, _, is_valid = attend_pieces(
        arguments, kv, layer, group, window, query, out, positions, query_start, page_table, float_of(a[_SCALE]), sinks,
        tiles,
    )  # fmt: skip
    if not is_valid:
        a[FAULT] = 1


def _write_f32(arguments: Any) -> None:
    _write_step(arguments, _ZERO)


def _write_bf16(arguments: Any) -> None:
    _write_step(arguments, np.uint16(0))


def _attend_f32(arguments: Any) -> None:
    _attend_step(arguments, _ZERO, None)


def _attend_bf16(arguments: Any) -> None:
    _attend_step(arguments, np.uint16(0), carray(arguments, NUM_ARGUMENTS)[_TILES])


WRITE, ATTEND = (Kernel(_write_f32), Kernel(_write_bf16)), (Kernel(_attend_f32), Kernel(_attend_bf16))

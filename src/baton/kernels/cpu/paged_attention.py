"""CPU kernels of paged attention, batch-invariant.

Tiles of 64 keys at ABSOLUTE positions go through `attention_tile`. For one row and head, the sequence of floating-point
operations depends only on its position, its window and the head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit
from baton.kernels.cpu.attention_tile import (
    F32_BYTES,
    LINE,
    MINUS_INFINITY,
    ROW_BLOCK,
    TILE,
    attend_tile,
    from_a_line,
    store_means,
    take_queries,
)
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS
from baton.kernels.cpu.omp import Kernel, float_of, pointer, take
from baton.kernels.cpu.scalar import to_f32
from baton.kernels.cpu.simd import LANES, touch
from baton.kernels.cpu.tile_attention import attend_in_tiles, attend_whole_tile, interleave
from baton.kernels.cpu.tiles import HAS_TILES, TILE_ROWS, begin_tiles, end_tiles
from baton.kernels.cpu.transposes import transpose, widen

# Query vectors that share one load of a tile: they fit in a core's cache.
_QUERY_VECTORS = 128
# Bytes read ahead at once, which a core's cache keeps until all heads have used them.
_READ_AHEAD_BYTES = 1 << 18
# With this many requests, threads share the work well without splitting a request's heads.
_MIN_REQUESTS = 4
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
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
def page_of(kv: Any, position: Any, pages: Any) -> Any:
    """The page of a position's slot; 0 for a bad one."""
    column = position // kv.shape[3]
    if column < 0 or column >= len(pages):
        return 0
    page = np.int64(pages[column])
    return page if 0 < page < kv.shape[0] else 0


@jit
def write_row(kv: Any, layer: int, page: int, slot: int, k: Any, v: Any) -> None:
    """Store a row's keys and values [G * D or more]."""
    heads, size = kv.shape[4], kv.shape[5]
    for h in range(heads):
        for d in range(size):
            kv[page, layer, 0, slot, h, d] = k[h * size + d]
            kv[page, layer, 1, slot, h, d] = v[h * size + d]


@jit
def are_valid_slots(kv: Any, positions: Any, query_start: Any, page_table: Any) -> bool:
    for r in range(len(query_start) - 1):
        for row in range(query_start[r], query_start[r + 1]):
            if page_of(kv, positions[row], page_table[r]) == 0:
                return False
    return True


@jit
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
    kv: Any, layer: int, head: int, pages: Any, base: int, first: int, last: int, keys: Any, values: Any, packed: Any,
    rows: Any, in_pairs: bool, widens: bool, packs: bool,
) -> bool:  # fmt: skip
    """Load tokens [first, last) of the tile at `base` as float32: keys [D, 64], transposed, and if it `widens` values
    [64, D]. If it `packs` all 64, values are also `packed` [32, D, 2], in bfloat16.

    `in_pairs`: keys stay bfloat16, [D / 2, 64, 2]. `rows` int64 [16] is scratch for addresses. Other lanes are
    undefined. Returns False for a bad page id.
    """
    page_size, size = kv.shape[3], kv.shape[5]
    whole = size - size % LANES
    element, region = kv[0, 0, 0, 0, 0, 0], np.int64(kv.ctypes.data)
    key_bytes, value_bytes = F32_BYTES * TILE, F32_BYTES * values.shape[1]
    values_at, keys_at, rows_at = np.int64(values.ctypes.data), np.int64(keys.ctypes.data), np.int64(rows.ctypes.data)
    for lane in range((first - base) // LANES * LANES, last - base, LANES):
        # Lanes without a token repeat an existing one.
        token = max(base + lane, first)
        column = token // page_size
        slot = token - column * page_size
        for j in range(LANES):
            if first < base + lane + j < last and j > 0:
                slot += 1
                if slot == page_size:
                    column, slot = column + 1, 0
            page = np.int64(pages[column])
            if page <= 0 or page >= kv.shape[0]:
                return False
            rows[j] = (
                region + page * kv.strides[0] + layer * kv.strides[1] + slot * kv.strides[3] + head * kv.strides[4]
            )
            at = values_at + (lane + j) * value_bytes
            for d in range(0, whole if widens else 0, LANES):
                widen(element, rows[j] + kv.strides[2] + d * kv.itemsize, at + d * F32_BYTES)
            for d in range(whole, size):
                keys[d, lane + j] = to_f32(kv[page, layer, 0, slot, head, d])
                values[lane + j, d] = to_f32(kv[page, layer, 1, slot, head, d])
        if HAS_TILES:
            for j in range(0, LANES if packs else 0, 2):
                at = np.int64(packed.ctypes.data) + (lane + j) // 2 * F32_BYTES * size
                interleave(rows[j] + kv.strides[2], rows[j + 1] + kv.strides[2], size, at)
        if in_pairs:
            for d in range(0, size // 2, LANES):
                transpose(_ZERO, rows_at, d * F32_BYTES, keys_at + d * key_bytes + lane * F32_BYTES, key_bytes)
        else:
            for d in range(0, whole, LANES):
                transpose(element, rows_at, d * kv.itemsize, keys_at + d * key_bytes + lane * F32_BYTES, key_bytes)
    return True


@jit
def _read_ahead(kv: Any, layer: int, head: int, num_heads: int, pages: Any, first: int, last: int) -> None:
    """Bring tokens [first, last) of `num_heads` heads into this core's cache: contiguous bytes come faster."""
    page_size = kv.shape[3]
    token = first
    while token < last:
        column = token // page_size
        slot, page = token - column * page_size, np.int64(pages[column])
        if page <= 0 or page >= kv.shape[0]:
            return
        count = min(page_size - slot, last - token)
        keys_at = np.int64(kv.ctypes.data) + page * kv.strides[0] + layer * kv.strides[1] + head * kv.strides[4]
        for at in (keys_at, keys_at + kv.strides[2]):
            for j in range(slot, slot + count):
                for offset in range(0, num_heads * kv.strides[4], LINE):
                    touch(at + j * kv.strides[3] + offset)
        token += count


@jit
def _attend_block(
    kv: Any, layer: int, head: int, ahead: int, group: int, query: Any, out: Any, start: int, end: int, positions: Any,
    pages: Any, scale: Any, window: int, sinks: Any, tiles: int,
) -> bool:  # fmt: skip
    """Compute out for rows [start, end) of one request and the query heads of one KV head. Returns False for a bad
    page id. `ahead`: the heads, from this one on, that are read ahead.
    """
    size = kv.shape[5]
    padded, count = (size + LANES - 1) // LANES * LANES, (end - start) * group
    keys = from_a_line(np.empty(size * TILE + LINE, np.float32), size * TILE).reshape(size, TILE)
    values = np.empty((TILE, padded), np.float32)
    queries = np.empty((count, size), np.float32)
    maxima, totals = np.full(count, MINUS_INFINITY), np.zeros(count, np.float32)
    # If the pairs fill whole vectors.
    in_pairs = HAS_BF16_PAIRS and kv.itemsize == 2 and size % (2 * LANES) == 0
    in_tiles = HAS_TILES and in_pairs and tiles != 0
    at_once = min(TILE_ROWS, count) if in_tiles else ROW_BLOCK
    factors = np.empty(at_once, np.float32)
    rows, edges, seen = np.empty(LANES, np.int64), np.empty((2, at_once), np.int64), np.empty(count, np.int64)
    num_packed, whole = TILE * size if in_tiles else 0, (count + at_once - 1) // at_once * at_once
    packed = from_a_line(np.empty(num_packed + LINE, np.uint16), num_packed).reshape(-1, size, 2)
    num_pairs, num_scores = whole * size if in_pairs else 0, 2 * at_once * TILE
    # While one group's weights are computed, tiles multiply another's.
    scores = from_a_line(np.empty(num_scores + LINE, np.float32), num_scores).reshape(2, at_once, TILE)
    weights = from_a_line(np.empty(2 * num_scores + LINE, np.uint16), 2 * num_scores).reshape(2, 2, at_once, TILE)
    sums = from_a_line(np.zeros(whole * padded + LINE, np.float32), whole * padded).reshape(whole, padded)
    pairs = from_a_line(np.empty(num_pairs + LINE, query.dtype), num_pairs).reshape(-1, size)
    take_queries(query, positions, sinks, start, head, group, scale, seen, queries, pairs, maxima, totals)
    # Padding columns, which no row reads, stay finite.
    values[:, size:] = _ZERO
    limit = positions[end - 1] + 1
    oldest = max(positions[start] - window + 1, 0) if window > 0 else 0
    read_ahead = max(1, _READ_AHEAD_BYTES // (2 * TILE * max(1, ahead) * kv.strides[4])) * TILE
    if HAS_TILES and in_tiles:
        begin_tiles(at_once)
    for base in range(oldest // TILE * TILE, limit, TILE):
        if ahead > 0 and (base - oldest // TILE * TILE) % read_ahead == 0:
            _read_ahead(kv, layer, head, ahead, pages, max(base, oldest), min(base + read_ahead, limit))
        is_whole = positions[start] >= base + TILE - 1 and (window == 0 or limit - window <= base)
        if not _load_tile(
            kv, layer, head, pages, base, max(base, oldest), min(base + TILE, limit), keys, values, packed, rows,
            in_pairs, not in_tiles or not is_whole, in_tiles and limit >= base + TILE,
        ):  # fmt: skip
            return False
        if HAS_TILES and in_tiles:
            if is_whole:
                attend_whole_tile(pairs, keys, packed, sums, maxima, totals, scores, weights, count, scale)
            else:
                attend_in_tiles(
                    base, window, seen, pairs, keys, packed, values, sums, maxima, totals, scores[0], weights[0],
                    factors, edges, scale,
                )  # fmt: skip
            continue
        attend_tile(
            base, window, seen, queries, pairs, keys, values, sums, maxima, totals, scores[0], factors, edges, scale
        )
    if HAS_TILES and in_tiles:
        end_tiles()
    store_means(sums, totals, start, head, group, size, out)
    return True


@jit
def attend_pieces(
    counter: Any, kv: Any, layer: int, group: int, window: int, query: Any, out: Any, positions: Any, query_start: Any,
    page_table: Any, scale: Any, sinks: Any, tiles: int,
) -> tuple[int, int, bool]:  # fmt: skip
    """Attend the pieces that this thread takes from `counter`. Returns the number of all pieces, that of this thread's,
    and whether all page ids were good; a bad one ends it."""
    num_requests, num_rows, heads = len(query_start) - 1, len(positions), kv.shape[4]
    step = max(1, _QUERY_VECTORS // group)
    # Longest pieces first, so that threads finish together. The heads of a few rows are one piece, since their keys and
    # values are contiguous; with few requests, threads share the heads.
    heads_per_piece = heads if num_requests >= _MIN_REQUESTS and num_rows < 2 * num_requests else 1
    mine, number, taken, is_valid = take(counter), 0, 0, True
    for r in range(num_requests - 1, -1, -1):
        begin, stop = query_start[r], query_start[r + 1]
        for block in range((stop - begin + step - 1) // step - 1, -1, -1):
            start = begin + block * step
            end = min(start + step, stop)
            for first in range(0, heads, heads_per_piece):
                if number == mine:
                    is_valid = is_valid and positions[end - 1] // kv.shape[3] < page_table.shape[1]
                    for head in range(first, first + heads_per_piece):
                        ahead = heads_per_piece if head == first else 0
                        is_valid = is_valid and _attend_block(
                            kv, layer, head, ahead, group, query, out, start, end, positions, page_table[r], scale,
                            window, sinks, tiles,
                        )  # fmt: skip
                    taken += 1
                    mine = take(counter)
                number += 1
    return number, taken, is_valid


@jit
def _region(a: Any, element: Any) -> Any:
    """The group's keys and values [pages, layers, 2, page_size, G, D]."""
    return carray(pointer(a[_KV], element), (a[_PAGES], a[_LAYERS], 2, a[_PAGE_SIZE], a[_HEADS], a[_SIZE]))


@jit
def _batch(a: Any) -> Any:
    """Positions, query starts and page table, as in `AttnBatch`."""
    num_requests = a[_REQUESTS]
    return (
        carray(pointer(a[_POSITIONS], np.int64(0)), (a[_ROWS],)),
        carray(pointer(a[_QUERY_START], np.int32(0)), (num_requests + 1,)),
        carray(pointer(a[_PAGE_TABLE], np.int32(0)), (num_requests, a[_COLUMNS])),
    )


@jit
def _write_step(arguments: Any, element: Any) -> None:
    a = carray(arguments, NUM_ARGUMENTS)
    positions, query_start, page_table = _batch(a)
    # Queries, keys and values are parts of the same rows.
    shape = (a[_ROWS], a[_WIDTH])
    k, v = carray(pointer(a[_KEYS], element), shape), carray(pointer(a[_VALUES], element), shape)
    if not _write(_region(a, element), a[_LAYER], k, v, positions, query_start, page_table):
        a[FAULT] = 1


@jit
def _attend_step(arguments: Any, element: Any) -> None:
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
        a[_TILES],
    )  # fmt: skip
    if not is_valid:
        a[FAULT] = 1


def _write_f32(arguments: Any) -> None:
    _write_step(arguments, _ZERO)


def _write_bf16(arguments: Any) -> None:
    _write_step(arguments, np.uint16(0))


def _attend_f32(arguments: Any) -> None:
    _attend_step(arguments, _ZERO)


def _attend_bf16(arguments: Any) -> None:
    _attend_step(arguments, np.uint16(0))


WRITE, ATTEND = (Kernel(_write_f32), Kernel(_write_bf16)), (Kernel(_attend_f32), Kernel(_attend_bf16))

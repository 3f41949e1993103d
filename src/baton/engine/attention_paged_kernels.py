"""Kernels of paged attention on the CPU: a row comes out with the same bits in every batch.

Online softmax (Milakov & Gimelshein, 2018) over tiles of 64 keys at ABSOLUTE positions 0, 64, 128, ... For
one row and head the sequence of floating-point operations depends on its position, its window and the head
size, on nothing else: not on the other rows, not on the chunk it came in, not on page size or page order.
Rows are blocked only to share the loaded tile, and the query heads of one KV head share it too.

A tile's keys are transposed while they are loaded, so that scores of 64 keys are 64 independent lanes and
the sum over the head size runs in order. Scores and outputs of four vectors at a time stay in registers.

Every kernel is a plain function of its module: what closes over another kernel would be compiled anew by each process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.models.cpu_kernels import exp32, from_f32, jit, to_f32
from baton.models.cpu_team import Kernel, float_of, pointer, take
from baton.models.cpu_vectors import LANES, WIDE, exponentials, largest, prefetch, products, transpose, widen

_TILE = WIDE * LANES
# Query vectors that share one load of a tile; their queries and outputs stay in a core's cache.
_VECTORS = 128
_TOGETHER = 4
_F32_BYTES = 4
# Bytes that memory is read by.
_LINE = 64
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MINUS_INFINITY = np.float32(-np.inf)
# Arguments of WRITE and ATTEND, behind the counter of `take`; names of arrays stand for addresses. FAULT begins as 0.
NUM_ARGUMENTS = 24
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
) = range(1, NUM_ARGUMENTS)


@jit
def _write(kv: Any, layer: int, k: Any, v: Any, positions: Any, query_start: Any, page_table: Any) -> bool:
    """Store k and v [T, G * D or more] in their slots. Checks all slots before it writes; False: one is bad."""
    page_size = kv.shape[3]
    for r in range(len(query_start) - 1):
        for row in range(query_start[r], query_start[r + 1]):
            column = positions[row] // page_size
            if column < 0 or column >= page_table.shape[1]:
                return False
            page = page_table[r, column]
            if page <= 0 or page >= kv.shape[0]:
                return False
    heads, size = kv.shape[4], kv.shape[5]
    for r in range(len(query_start) - 1):
        for row in range(query_start[r], query_start[r + 1]):
            column = positions[row] // page_size
            page, slot = page_table[r, column], positions[row] - column * page_size
            for h in range(heads):
                for d in range(size):
                    kv[page, layer, 0, slot, h, d] = k[row, h * size + d]
                    kv[page, layer, 1, slot, h, d] = v[row, h * size + d]
    return True


@jit
def _load_tile(
    kv: Any, layer: int, head: int, pages: Any, base: int, first: int, last: int, keys: Any, values: Any, rows: Any
) -> bool:
    """Tokens [first, last) of the tile at `base` as float32: keys [D, 64], transposed, values [64, D].

    `rows` int64 [16] is room for addresses. Other lanes get numbers without meaning. False: a bad page id.
    """
    page_size, size = kv.shape[3], kv.shape[5]
    whole = size - size % LANES
    element, region = kv[0, 0, 0, 0, 0, 0], np.int64(kv.ctypes.data)
    key_bytes, value_bytes = _F32_BYTES * _TILE, _F32_BYTES * values.shape[1]
    values_at, keys_at, rows_at = np.int64(values.ctypes.data), np.int64(keys.ctypes.data), np.int64(rows.ctypes.data)
    for lane in range((first - base) // LANES * LANES, last - base, LANES):
        # Lanes without a token repeat one that is there.
        token = max(base + lane, first)
        column = token // page_size
        slot = token - column * page_size
        for j in range(LANES):
            if first < base + lane + j < last and j > 0:
                slot += 1
                if slot == page_size:
                    column, slot = column + 1, 0
            page = np.int64(pages[column])
            if page < 0 or page >= kv.shape[0]:
                return False
            rows[j] = (
                region + page * kv.strides[0] + layer * kv.strides[1] + slot * kv.strides[3] + head * kv.strides[4]
            )
            at = values_at + (lane + j) * value_bytes
            for d in range(0, whole, LANES):
                widen(element, rows[j] + kv.strides[2] + d * kv.itemsize, at + d * _F32_BYTES)
            for d in range(whole, size):
                keys[d, lane + j] = to_f32(kv[page, layer, 0, slot, head, d])
                values[lane + j, d] = to_f32(kv[page, layer, 1, slot, head, d])
        for d in range(0, whole, LANES):
            transpose(element, rows_at, keys_at + d * key_bytes + lane * _F32_BYTES, key_bytes)
            for j in range(LANES):
                rows[j] += LANES * kv.itemsize
    return True


@jit
def _prefetch_tile(kv: Any, layer: int, head: int, pages: Any, first: int, last: int) -> None:
    """Ask for the keys and values of tokens [first, last). A page's slots lie far apart in memory, and a CPU that
    computes on a tile does not ask for the next by itself."""
    page_size = kv.shape[3]
    token = first
    while token < last:
        column = token // page_size
        slot, page = token - column * page_size, np.int64(pages[column])
        if page < 0 or page >= kv.shape[0]:
            return
        count = min(page_size - slot, last - token)
        at = np.int64(kv.ctypes.data) + page * kv.strides[0] + layer * kv.strides[1] + head * kv.strides[4]
        for j in range(slot, slot + count):
            for offset in range(0, kv.strides[4], _LINE):
                prefetch(at + j * kv.strides[3] + offset)
                prefetch(at + j * kv.strides[3] + kv.strides[2] + offset)
        token += count


@jit
def _multiply(
    num_rows: int, left: Any, row_bytes: int, right: Any, right_bytes: int, steps: int, factors: Any, out: Any,
    out_bytes: int, width: int,
) -> None:  # fmt: skip
    """As `products`, of 1 to 4 rows with `width` numbers each, a multiple of 16; `left` steps by one number."""
    done = 0
    while done < width:
        here, there = right + done * _F32_BYTES, out + done * _F32_BYTES
        if width - done >= _TILE:
            if num_rows == 4:
                products(4, left, row_bytes, _F32_BYTES, here, right_bytes, steps, WIDE, factors, there, out_bytes)
            elif num_rows == 3:
                products(3, left, row_bytes, _F32_BYTES, here, right_bytes, steps, WIDE, factors, there, out_bytes)
            elif num_rows == 2:
                products(2, left, row_bytes, _F32_BYTES, here, right_bytes, steps, WIDE, factors, there, out_bytes)
            else:
                products(1, left, row_bytes, _F32_BYTES, here, right_bytes, steps, WIDE, factors, there, out_bytes)
            done += _TILE
        else:
            for row in range(num_rows):
                factor = factors + row * _F32_BYTES if factors != 0 else factors
                at = left + row * row_bytes
                products(
                    1,
                    at,
                    row_bytes,
                    _F32_BYTES,
                    here,
                    right_bytes,
                    steps,
                    1,
                    factor,
                    there + row * out_bytes,
                    out_bytes,
                )
            done += LANES


@jit
def _attend_block(
    kv: Any, layer: int, head: int, group: int, query: Any, out: Any, start: int, end: int, positions: Any, pages: Any,
    scale: Any, window: int, sinks: Any,
) -> bool:  # fmt: skip
    """Fill out for rows [start, end) of one request and the query heads of one KV head. False: a bad page id."""
    size = kv.shape[5]
    padded, count = (size + LANES - 1) // LANES * LANES, (end - start) * group
    keys, values = np.empty((size, _TILE), np.float32), np.empty((_TILE, padded), np.float32)
    queries, sums = np.empty((count, size), np.float32), np.zeros((count, padded), np.float32)
    maxima, totals = np.full(count, _MINUS_INFINITY), np.zeros(count, np.float32)
    scores, factors = np.empty((_TOGETHER, _TILE), np.float32), np.empty(_TOGETHER, np.float32)
    rows, low, high = np.empty(LANES, np.int64), np.empty(_TOGETHER, np.int64), np.empty(_TOGETHER, np.int64)
    values_at, keys_at, scores_at = (
        np.int64(values.ctypes.data),
        np.int64(keys.ctypes.data),
        np.int64(scores.ctypes.data),
    )
    sums_at, factors_at = np.int64(sums.ctypes.data), np.int64(factors.ctypes.data)
    score_bytes, sum_bytes = _F32_BYTES * _TILE, _F32_BYTES * padded
    for i in range(count):
        for d in range(size):
            queries[i, d] = to_f32(query[start + i // group, (head * group + i % group) * size + d]) * scale
        if len(sinks):
            # A sink is a logit that has been summed before the first tile, with no value.
            maxima[i], totals[i] = sinks[head * group + i % group], _ONE
    # Columns that no row reads stay finite.
    values[:, size:] = _ZERO
    limit = positions[end - 1] + 1
    oldest = max(positions[start] - window + 1, 0) if window > 0 else 0
    _prefetch_tile(kv, layer, head, pages, oldest, min(oldest // _TILE * _TILE + _TILE, limit))
    for base in range(oldest // _TILE * _TILE, limit, _TILE):
        if not _load_tile(
            kv, layer, head, pages, base, max(base, oldest), min(base + _TILE, limit), keys, values, rows
        ):
            return False
        _prefetch_tile(kv, layer, head, pages, base + _TILE, min(base + 2 * _TILE, limit))
        for i in range(0, count, _TOGETHER):
            together = min(_TOGETHER, count - i)
            first, last = _TILE, 0
            for j in range(together):
                position = positions[start + (i + j) // group]
                low[j] = max(position - window + 1 - base, 0) if window > 0 else 0
                high[j] = min(position + 1 - base, _TILE)
                if low[j] < high[j]:
                    first, last = min(first, low[j]), max(last, high[j])
            if first >= last:
                continue
            # Numba frees an array behind its last use by name, and its address is none: this is the queries' last.
            left = np.int64(queries.ctypes.data) + i * size * _F32_BYTES
            _multiply(
                together, left, size * _F32_BYTES, keys_at, score_bytes, size, 0, scores_at, score_bytes, _TILE
            )  # fmt: skip
            for j in range(together):
                at = scores_at + j * score_bytes
                factors[j] = _ONE
                if low[j] >= high[j]:
                    scores[j] = _ZERO
                    continue
                peak = max(maxima[i + j], largest(at, low[j], high[j]))
                if maxima[i + j] < peak:
                    factors[j] = exp32(maxima[i + j] - peak) if maxima[i + j] > _MINUS_INFINITY else _ZERO
                    maxima[i + j] = peak
                totals[i + j] = totals[i + j] * factors[j] + exponentials(at, low[j], high[j], peak)
            _multiply(
                together, scores_at + first * _F32_BYTES, score_bytes, values_at + first * sum_bytes, sum_bytes,
                last - first, factors_at, sums_at + i * sum_bytes, sum_bytes, padded,
            )  # fmt: skip
    element = out[0, 0]
    for i in range(count):
        for d in range(size):
            out[start + i // group, (head * group + i % group) * size + d] = from_f32(element, sums[i, d] / totals[i])
    return True


@jit
def _region(a: Any, element: Any) -> Any:
    """The group's keys and values."""
    return carray(pointer(a[_KV], element), (a[_PAGES], a[_LAYERS], 2, a[_PAGE_SIZE], a[_HEADS], a[_SIZE]))


@jit
def _batch(a: Any) -> Any:
    """Positions, query starts and page table of `AttnBatch`."""
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
    # Rows of queries, keys and values lie side by side in one array.
    shape = (a[_ROWS], a[_WIDTH])
    k, v = carray(pointer(a[_KEYS], element), shape), carray(pointer(a[_VALUES], element), shape)
    if not _write(_region(a, element), a[_LAYER], k, v, positions, query_start, page_table):
        a[FAULT] = 1


@jit
def _attend_step(arguments: Any, element: Any) -> None:
    a = carray(arguments, NUM_ARGUMENTS)
    positions, query_start, page_table = _batch(a)
    kv, layer, group, window = _region(a, element), a[_LAYER], a[_GROUP], a[_WINDOW]
    num_requests, heads = a[_REQUESTS], a[_HEADS]
    query = carray(pointer(a[_QUERIES], element), (a[_ROWS], a[_WIDTH]))
    out = carray(pointer(a[_OUT], element), (a[_ROWS], heads * group * a[_SIZE]))
    # float32 [H], or empty.
    sinks = carray(pointer(a[_SINKS], _ZERO), (heads * group if a[_SINKS] else 0,))
    scale, step = float_of(a[_SCALE]), max(1, _VECTORS // group)
    # Long prompts' last rows see most keys: the longest pieces come first, so that threads end together.
    mine, number = take(arguments), 0
    for r in range(num_requests - 1, -1, -1):
        begin, stop = query_start[r], query_start[r + 1]
        for block in range((stop - begin + step - 1) // step - 1, -1, -1):
            start = begin + block * step
            end = min(start + step, stop)
            for head in range(heads):
                if number == mine:
                    if positions[end - 1] // kv.shape[3] >= page_table.shape[1] or not _attend_block(
                        kv, layer, head, group, query, out, start, end, positions, page_table[r], scale, window, sinks
                    ):
                        a[FAULT] = 1
                        return
                    mine = take(arguments)
                number += 1


def _write_wide(arguments: Any) -> None:
    _write_step(arguments, _ZERO)


def _write_narrow(arguments: Any) -> None:
    _write_step(arguments, np.uint16(0))


def _attend_wide(arguments: Any) -> None:
    _attend_step(arguments, _ZERO)


def _attend_narrow(arguments: Any) -> None:
    _attend_step(arguments, np.uint16(0))


# Of float32, and of bfloat16.
WRITE, ATTEND = (Kernel(_write_wide), Kernel(_write_narrow)), (Kernel(_attend_wide), Kernel(_attend_narrow))

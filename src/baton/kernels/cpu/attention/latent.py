"""CPU kernels of absorbed latent attention, batch-invariant.

A key is a cached row, a value its first C elements. All heads of all rows of a request share the loaded tiles.

Shapes: T rows, H heads, W elements of a cached row, C of them its latent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.lib.stride_tricks import as_strided

from baton.jit_cache import jit, jit_inline
from baton.kernels.cpu.attention.online_softmax import (
    F32_BYTES,
    MINUS_INFINITY,
    ROW_BLOCK,
    TILE,
    attend_tile,
    store_means,
)
from baton.kernels.cpu.omp import Kernel, float_of, pointer, take
from baton.kernels.cpu.scalar import to_f32
from baton.kernels.cpu.simd import LANES
from baton.kernels.cpu.transposes import transpose, widen

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
# Arguments as in `paged_attention`. A plane is its address, the elements per row, and the strides in bytes of pages,
# layers and rows.
(
    FAULT,
    _ROWS,
    _REQUESTS,
    _COLUMNS,
    _LAYER,
    _HEADS,
    _WIDTH,
    _LATENT,
    _PAGES,
    _LAYERS,
    _PAGE_SIZE,
    _STEP,
    _SCALE,
    _POSITIONS,
    _QUERY_START,
    _PAGE_TABLE,
    _QUERIES,
    _OUT,
    FIRST_PLANE,
) = range(1, 20)
SECOND_PLANE = FIRST_PLANE + 5
NUM_ARGUMENTS = SECOND_PLANE + 5


@jit
def _load_tile(
    plane: Any, layer: int, pages: Any, base: int, limit: int, offset: int, num_values: int, keys: Any, values: Any,
    rows: Any,
) -> bool:  # fmt: skip
    """Load tokens [base, limit) of one plane as float32: element d to keys[offset + d], transposed, and the first
    `num_values` elements to values [64, C].

    `rows` int64 [16] is scratch for addresses. Lanes without a token repeat the last one. Returns False for a bad page
    id.
    """
    page_size, width = plane.shape[2], plane.shape[4]
    whole, whole_values = width - width % LANES, num_values - num_values % LANES
    element, region = plane[0, 0, 0, 0, 0], np.int64(plane.ctypes.data)
    key_bytes, value_bytes = F32_BYTES * TILE, F32_BYTES * values.shape[1]
    values_at, keys_at, rows_at = np.int64(values.ctypes.data), np.int64(keys.ctypes.data), np.int64(rows.ctypes.data)
    for lane in range(0, limit - base, LANES):
        column = (base + lane) // page_size
        slot = base + lane - column * page_size
        for j in range(LANES):
            if 0 < j < limit - base - lane:
                slot += 1
                if slot == page_size:
                    column, slot = column + 1, 0
            page = np.int64(pages[column])
            if page <= 0 or page >= plane.shape[0]:
                return False
            rows[j] = region + page * plane.strides[0] + layer * plane.strides[1] + slot * plane.strides[2]
            at = values_at + (lane + j) * value_bytes
            for d in range(0, whole_values, LANES):
                widen(element, rows[j] + d * plane.itemsize, at + d * F32_BYTES)
            for d in range(whole_values, num_values):
                values[lane + j, d] = to_f32(plane[page, layer, slot, 0, d])
            for d in range(whole, width):
                keys[offset + d, lane + j] = to_f32(plane[page, layer, slot, 0, d])
        for d in range(0, whole, LANES):
            at = keys_at + (offset + d) * key_bytes + lane * F32_BYTES
            transpose(element, rows_at, d * plane.itemsize, at, key_bytes)
    return True


@jit
def _attend_block(
    planes: Any, layer: int, query: Any, out: Any, start: int, end: int, positions: Any, pages: Any, scale: Any
) -> bool:
    """Compute vectors [start, end) of out [T * H, C] from query [T * H, W], for one request. Returns False for a bad
    page id."""
    size, latent, heads, count = query.shape[1], out.shape[1], query.shape[0] // len(positions), end - start
    padded = (latent + LANES - 1) // LANES * LANES
    keys, values = np.empty((size, TILE), np.float32), np.empty((TILE, padded), np.float32)
    queries, sums = np.empty((count, size), np.float32), np.zeros((count, padded), np.float32)
    maxima, totals = np.full(count, MINUS_INFINITY), np.zeros(count, np.float32)
    scores, factors = np.empty((ROW_BLOCK, TILE), np.float32), np.empty(ROW_BLOCK, np.float32)
    rows, edges, seen = np.empty(LANES, np.int64), np.empty((2, ROW_BLOCK), np.int64), np.empty(count, np.int64)
    pairs = np.empty((0, size), query.dtype)
    for i in range(count):
        seen[i] = positions[(start + i) // heads]
        for d in range(size):
            queries[i, d] = to_f32(query[start + i, d]) * scale
    # Padding columns, which no row reads, stay finite.
    values[:, latent:] = _ZERO
    limit = positions[(end - 1) // heads] + 1
    for base in range(0, limit, TILE):
        offset = 0
        for plane in planes:
            if not plane.shape[4]:
                continue  # a single plane holds everything
            num_values = min(plane.shape[4], latent - offset) if offset < latent else 0
            if not _load_tile(
                plane, layer, pages, base, min(base + TILE, limit), offset, num_values, keys, values, rows
            ):
                return False
            offset += plane.shape[4]
        attend_tile(base, 0, seen, queries, pairs, keys, values, sums, maxima, totals, scores, factors, edges, _ONE)
    store_means(sums, totals, start, 0, 1, latent, out)
    return True


@jit_inline
def _plane(a: Any, at: int, element: Any) -> Any:
    """[pages, layers, page_size, 1, width], strided, from the arguments at `at`."""
    shape = (a[_PAGES], a[_LAYERS], a[_PAGE_SIZE], 1, a[at + 1])
    first = carray(pointer(a[at], element), shape)
    return as_strided(first, shape, (a[at + 2], a[at + 3], a[at + 4], a[at + 4], first.itemsize))


@jit_inline
def _attend_step(arguments: Any, element: Any) -> None:
    a = carray(arguments, NUM_ARGUMENTS)
    num_rows, num_requests, heads = a[_ROWS], a[_REQUESTS], a[_HEADS]
    positions = carray(pointer(a[_POSITIONS], np.int64(0)), (num_rows,))
    query_start = carray(pointer(a[_QUERY_START], np.int32(0)), (num_requests + 1,))
    page_table = carray(pointer(a[_PAGE_TABLE], np.int32(0)), (num_requests, a[_COLUMNS]))
    query = carray(pointer(a[_QUERIES], element), (num_rows * heads, a[_WIDTH]))
    out = carray(pointer(a[_OUT], element), (num_rows * heads, a[_LATENT]))
    planes, scale = (_plane(a, FIRST_PLANE, element), _plane(a, SECOND_PLANE, element)), float_of(a[_SCALE])
    mine, number = take(arguments), 0
    # Longest pieces first, so that threads finish together.
    for r in range(num_requests - 1, -1, -1):
        begin, stop = query_start[r] * heads, query_start[r + 1] * heads
        for block in range((stop - begin + a[_STEP] - 1) // a[_STEP] - 1, -1, -1):
            if number == mine:
                start = begin + block * a[_STEP]
                end = min(start + a[_STEP], stop)
                is_valid = positions[query_start[r + 1] - 1] // a[_PAGE_SIZE] < a[_COLUMNS]
                if not is_valid or not _attend_block(
                    planes, a[_LAYER], query, out, start, end, positions, page_table[r], scale
                ):
                    a[FAULT] = 1
                    return
                mine = take(arguments)
            number += 1


def _attend_f32(arguments: Any) -> None:
    _attend_step(arguments, _ZERO)


def _attend_bf16(arguments: Any) -> None:
    _attend_step(arguments, np.uint16(0))


ATTEND = Kernel(_attend_f32), Kernel(_attend_bf16)

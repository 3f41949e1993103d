"""Attention of a pass's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.jit_cache import jit_inline
from baton.kernels.cpu.attention.paged import attend_pieces, write_row
from baton.kernels.cpu.attention.pages import are_valid_slots, page_of
from baton.kernels.cpu.elementwise import norm_row, rotate_row
from baton.kernels.cpu.fused.fields import (
    ANGLES,
    ATTENDED,
    COS,
    EPS,
    FAULT,
    HALF,
    HEADS,
    K_NORM,
    KV,
    KV_HEADS,
    KV_LAYERS,
    MERGED,
    NUM_REGION_COLUMNS,
    NUM_REQUESTS,
    NUM_ROTARY_COLUMNS,
    NUM_ROWS,
    PAGE_COLUMNS,
    PAGE_SIZE,
    PAGE_TABLE,
    PAGES,
    POSITIONS,
    Q_NORM,
    QUERY_START,
    REGIONS,
    ROTARIES,
    ROTARY,
    ROTARY_ROWS,
    SCALE,
    SIN,
    SIZE,
    TILES,
)
from baton.kernels.cpu.fused.rows import BF16, ELEMENT_BYTES, ROWS_AT_ONCE, number_at
from baton.kernels.cpu.fused.stages import STAGE_BYTES, finish, take_piece
from baton.kernels.cpu.omp import float_of, pointer

_ZERO = np.float32(0.0)


@jit_inline
def _place(
    a: Any, layer: Any, index: int, kv: Any, positions: Any, query_start: Any, page_table: Any, stage: int
) -> None:
    """Norm and rotate queries and keys, and write keys and values to their slots."""
    heads, kv_heads, size, num_rows = a[HEADS], a[KV_HEADS], a[SIZE], a[NUM_ROWS]
    merged = carray(pointer(a[MERGED], BF16), (num_rows, heads + 2 * kv_heads, size))
    rotary = carray(pointer(a[ROTARIES] + 8 * NUM_ROTARY_COLUMNS * layer[ROTARY], np.int64(0)), (NUM_ROTARY_COLUMNS,))
    cos = carray(pointer(rotary[COS], BF16), (rotary[ROTARY_ROWS], rotary[HALF]))
    sin = carray(pointer(rotary[SIN], BF16), (rotary[ROTARY_ROWS], rotary[HALF]))
    total, mine, eps = (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE, 0, float_of(a[EPS])
    block = take_piece(stage)
    while block < total:
        request = 0
        for t in range(block * ROWS_AT_ONCE, min((block + 1) * ROWS_AT_ONCE, num_rows)):
            while query_start[request + 1] <= t:
                request += 1
            row, angle = merged[t], number_at(a[ANGLES], t)
            if layer[Q_NORM] != 0:
                for h in range(heads + kv_heads):
                    at = a[MERGED] + (t * len(row) + h) * size * ELEMENT_BYTES
                    norm_row(BF16, at, layer[Q_NORM] if h < heads else layer[K_NORM], size, eps, at)
            rotate_row(BF16, row[: heads + kv_heads], cos[angle], sin[angle])
            flat, page = row.reshape(-1), page_of(kv, positions[t], page_table[request])
            k, v = flat[heads * size :], flat[(heads + kv_heads) * size :]
            write_row(kv, index, page, positions[t] % kv.shape[3], k, v)
        mine += 1
        block = take_piece(stage)
    finish(stage, mine, total)


@jit_inline
def attend(a: Any, layer: Any, place: Any, is_wanted: bool, stage: int) -> bool:
    """Two stages: `_place`, and attention if that `is_wanted`. False: no such slot or page."""
    num_rows, num_requests, heads, kv_heads, size = a[NUM_ROWS], a[NUM_REQUESTS], a[HEADS], a[KV_HEADS], a[SIZE]
    region = carray(pointer(a[REGIONS] + 8 * NUM_REGION_COLUMNS * place[0], np.int64(0)), (NUM_REGION_COLUMNS,))
    positions = carray(pointer(a[POSITIONS], np.int64(0)), (num_rows,))
    query_start = carray(pointer(a[QUERY_START], np.int32(0)), (num_requests + 1,))
    page_table = carray(pointer(region[PAGE_TABLE], np.int32(0)), (num_requests, region[PAGE_COLUMNS]))
    shape: Any = (region[PAGES], region[KV_LAYERS], 2, region[PAGE_SIZE], kv_heads, size)
    kv = carray(pointer(region[KV], BF16), shape)
    # All threads get the same result.
    if not are_valid_slots(kv, positions, query_start, page_table):
        a[FAULT] = 1
        return False
    _place(a, layer, place[1], kv, positions, query_start, page_table, stage)
    if not is_wanted:
        return True
    query = carray(pointer(a[MERGED], BF16), (num_rows, (heads + 2 * kv_heads) * size))
    out = carray(pointer(a[ATTENDED], BF16), (num_rows, heads * size))
    stage += STAGE_BYTES
    total, mine, is_valid = attend_pieces(
        pointer(stage, np.int64(0)), kv, place[1], heads // kv_heads, place[2], query, out, positions,
        query_start, page_table, float_of(a[SCALE]), carray(pointer(np.int64(0), _ZERO), (0,)), a[TILES],
    )  # fmt: skip
    if not is_valid:
        a[FAULT] = 1
    finish(stage, mine, total)
    return bool(a[FAULT] == 0)

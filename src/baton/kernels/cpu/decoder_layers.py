"""Decoder layers over a few rows of bfloat16, all in one parallel region: attention with norms before it, SwiGLU MLP.

Few rows are limited by reading weights. One region, with stages that take a fraction of a microsecond to change
(`stages`), keeps memory busy from the first weight to the last. Each stage calls the functions of the kernel that does
the same alone (`elementwise`, `small_gemm`, `int8_gemm`, `paged_attention`), and rounds where they round: the bits are
theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from baton.kernels.cpu.elementwise import add_row, gate_row, norm_row, rotate_row
from baton.kernels.cpu.int8_gemm import multiply_block
from baton.kernels.cpu.jit_cache import jit
from baton.kernels.cpu.omp import Kernel, float_of, pointer, take
from baton.kernels.cpu.paged_attention import are_valid_slots, attend_pieces, page_of, write_row
from baton.kernels.cpu.simd import CHUNKS, LANES
from baton.kernels.cpu.small_gemm import multiply_piece, num_pieces, outputs_of
from baton.kernels.cpu.stages import STAGE_BYTES, finish, take_piece

BLOCK = CHUNKS * LANES
# Rows of norms and rotations that a thread takes at once.
_ROWS_AT_ONCE = 4
_BF16, _ELEMENT_BYTES = np.uint16(0), 2
_ZERO = np.float32(0.0)
# Bytes per thread and row: a block of gates and one of ups.
SCRATCH_BYTES = 2 * BLOCK * _ELEMENT_BYTES
STAGES_PER_LAYER = 8
# The arguments of LAYERS after the number of threads that have begun, which starts as 0, as does FAULT. Names of arrays
# stand for addresses.
NUM_ARGUMENTS = 22
(
    FAULT,
    _NUM_ROWS,
    _NUM_REQUESTS,
    _NUM_LAYERS,
    _HIDDEN,
    _HEADS,
    _KV_HEADS,
    _SIZE,
    _INNER,
    _EPS,
    _SCALE,
    _POSITIONS,
    _QUERY_START,
    _LAYERS,
    _STAGES,
    _SCRATCH,
    _X,  # [T, E]: the residual stream, in and out
    _NORMED,  # [T, E]
    _MERGED,  # [T, (H + 2 G) D]
    _ATTENDED,  # [T, H D]
    _INNERS,  # [T, I]
) = range(1, NUM_ARGUMENTS)
# The columns of a layer. A weight has its address, that of its scales (0: not int8) and that of its bias (0: none).
NUM_COLUMNS = 28
(
    INPUT_NORM, QKV, _, _, Q_NORM, K_NORM, OUT, _, _, POST_NORM, GATE_UP, _, _, DOWN, _, _,
    KV, PAGES, KV_LAYERS, PAGE_SIZE, PAGE_TABLE, PAGE_COLUMNS, KV_INDEX, WINDOW,
    COS, SIN, HALF,
    FEATURES,  # where the layer's input [T, E] is copied (0: nowhere)
) = range(NUM_COLUMNS)  # fmt: skip


@jit
def _norms(a: Any, weight: int, features: int, stage: int) -> None:
    size, num_rows, eps = a[_HIDDEN], a[_NUM_ROWS], float_of(a[_EPS])
    total, mine = (num_rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE, 0
    block = take_piece(stage)
    while block < total:
        for t in range(block * _ROWS_AT_ONCE, min((block + 1) * _ROWS_AT_ONCE, num_rows)):
            row = t * size * _ELEMENT_BYTES
            norm_row(_BF16, a[_X] + row, weight, size, eps, a[_NORMED] + row)
            if features != 0:
                x, kept = carray(pointer(a[_X] + row, _BF16), (size,)), carray(pointer(features + row, _BF16), (size,))
                for i in range(size):
                    kept[i] = x[i]
        mine += 1
        block = take_piece(stage)
    finish(stage, mine, total)


@jit
def _multiply(
    num_rows: int, x: int, columns: int, weight: Any, outputs: int, piece: int, out: int, out_bytes: int
) -> None:
    """A piece of x [T, K] times a weight (address, scale, bias). `out`: the address of its first output in row 0."""
    if weight[1] == 0:
        multiply_piece(num_rows, x, columns, weight[0], outputs, piece, weight[2], out, out_bytes)
    else:
        multiply_block(num_rows, x, columns, weight[0], weight[1], piece, weight[2], out, out_bytes)


@jit
def _project(a: Any, weight: Any, x: int, columns: int, outputs: int, out: int, scratch: int, stage: int) -> None:
    """x [T, K] times a weight: stored at `out`, or if that is 0 added to the residual stream."""
    num_rows, row_bytes, block_bytes = a[_NUM_ROWS], outputs * _ELEMENT_BYTES, BLOCK * _ELEMENT_BYTES
    total, mine = num_pieces(outputs) if weight[1] == 0 else outputs // BLOCK, 0
    piece = take_piece(stage)
    while piece < total:
        at, count = outputs_of(outputs, piece) if weight[1] == 0 else (piece * BLOCK, BLOCK)
        if out != 0:
            _multiply(num_rows, x, columns, weight, outputs, piece, out + at * _ELEMENT_BYTES, row_bytes)
        else:
            _multiply(num_rows, x, columns, weight, outputs, piece, scratch, block_bytes)
            for t in range(num_rows):
                to = a[_X] + t * row_bytes + at * _ELEMENT_BYTES
                add_row(_BF16, to, scratch + t * block_bytes, count, to)
        mine += 1
        piece = take_piece(stage)
    finish(stage, mine, total)


@jit
def _gate(a: Any, weight: Any, scratch: int, stage: int) -> None:
    """silu(gate) * up. A piece is a block of gates and the same one of ups."""
    num_rows, inner = a[_NUM_ROWS], a[_INNER]
    blocks, total, mine, block_bytes = inner // BLOCK, inner // BLOCK, 0, BLOCK * _ELEMENT_BYTES
    ups = scratch + num_rows * block_bytes
    piece = take_piece(stage)
    while piece < total:
        _multiply(num_rows, a[_NORMED], a[_HIDDEN], weight, 2 * inner, piece, scratch, block_bytes)
        _multiply(num_rows, a[_NORMED], a[_HIDDEN], weight, 2 * inner, blocks + piece, ups, block_bytes)
        for t in range(num_rows):
            row = t * block_bytes
            to = a[_INNERS] + (t * inner + piece * BLOCK) * _ELEMENT_BYTES
            gate_row(_BF16, scratch + row, ups + row, BLOCK, to)
        mine += 1
        piece = take_piece(stage)
    finish(stage, mine, total)


@jit
def _place(a: Any, layer: Any, kv: Any, positions: Any, query_start: Any, page_table: Any, stage: int) -> None:
    """Norm and rotate queries and keys, and write keys and values to their slots."""
    heads, kv_heads, size, num_rows = a[_HEADS], a[_KV_HEADS], a[_SIZE], a[_NUM_ROWS]
    merged = carray(pointer(a[_MERGED], _BF16), (num_rows, heads + 2 * kv_heads, size))
    cos = carray(pointer(layer[COS], _BF16), (num_rows, layer[HALF]))
    sin = carray(pointer(layer[SIN], _BF16), (num_rows, layer[HALF]))
    total, mine, eps = (num_rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE, 0, float_of(a[_EPS])
    block = take_piece(stage)
    while block < total:
        request = 0
        for t in range(block * _ROWS_AT_ONCE, min((block + 1) * _ROWS_AT_ONCE, num_rows)):
            while query_start[request + 1] <= t:
                request += 1
            row = merged[t]
            if layer[Q_NORM] != 0:
                for h in range(heads + kv_heads):
                    at = a[_MERGED] + (t * len(row) + h) * size * _ELEMENT_BYTES
                    norm_row(_BF16, at, layer[Q_NORM] if h < heads else layer[K_NORM], size, eps, at)
            rotate_row(_BF16, row[: heads + kv_heads], cos[t], sin[t])
            flat, page = row.reshape(-1), page_of(kv, positions[t], page_table[request])
            k, v = flat[heads * size :], flat[(heads + kv_heads) * size :]
            write_row(kv, layer[KV_INDEX], page, positions[t] % kv.shape[3], k, v)
        mine += 1
        block = take_piece(stage)
    finish(stage, mine, total)


@jit
def _attend(a: Any, layer: Any, stage: int) -> bool:
    """Stages `_place` and attention. Returns False for a slot or page that does not exist."""
    num_rows, num_requests, heads, kv_heads, size = a[_NUM_ROWS], a[_NUM_REQUESTS], a[_HEADS], a[_KV_HEADS], a[_SIZE]
    positions = carray(pointer(a[_POSITIONS], np.int64(0)), (num_rows,))
    query_start = carray(pointer(a[_QUERY_START], np.int32(0)), (num_requests + 1,))
    page_table = carray(pointer(layer[PAGE_TABLE], np.int32(0)), (num_requests, layer[PAGE_COLUMNS]))
    shape: Any = (layer[PAGES], layer[KV_LAYERS], 2, layer[PAGE_SIZE], kv_heads, size)
    kv = carray(pointer(layer[KV], _BF16), shape)
    # All threads find the same.
    if not are_valid_slots(kv, positions, query_start, page_table):
        a[FAULT] = 1
        return False
    _place(a, layer, kv, positions, query_start, page_table, stage)
    query = carray(pointer(a[_MERGED], _BF16), (num_rows, (heads + 2 * kv_heads) * size))
    out = carray(pointer(a[_ATTENDED], _BF16), (num_rows, heads * size))
    stage += STAGE_BYTES
    total, mine, is_valid = attend_pieces(
        pointer(stage, np.int64(0)), kv, layer[KV_INDEX], heads // kv_heads, layer[WINDOW], query, out, positions,
        query_start, page_table, float_of(a[_SCALE]), carray(pointer(np.int64(0), _ZERO), (0,)),
    )  # fmt: skip
    if not is_valid:
        a[FAULT] = 1
    finish(stage, mine, total)
    return bool(a[FAULT] == 0)


def _run_layers(arguments: Any) -> None:
    a = carray(arguments, NUM_ARGUMENTS)
    num_rows, hidden, inner, inners = a[_NUM_ROWS], a[_HIDDEN], a[_INNER], a[_INNERS]
    queries = a[_HEADS] * a[_SIZE]
    merged = queries + 2 * a[_KV_HEADS] * a[_SIZE]
    scratch = a[_SCRATCH] + take(arguments) * num_rows * SCRATCH_BYTES
    layers = carray(pointer(a[_LAYERS], np.int64(0)), (a[_NUM_LAYERS], NUM_COLUMNS))
    for number in range(a[_NUM_LAYERS]):
        layer, stage = layers[number], a[_STAGES] + number * STAGES_PER_LAYER * STAGE_BYTES
        _norms(a, layer[INPUT_NORM], layer[FEATURES], stage)
        _project(a, layer[QKV : QKV + 3], a[_NORMED], hidden, merged, a[_MERGED], scratch, stage + STAGE_BYTES)
        if not _attend(a, layer, stage + 2 * STAGE_BYTES):
            return
        _project(a, layer[OUT : OUT + 3], a[_ATTENDED], queries, hidden, 0, scratch, stage + 4 * STAGE_BYTES)
        _norms(a, layer[POST_NORM], 0, stage + 5 * STAGE_BYTES)
        _gate(a, layer[GATE_UP : GATE_UP + 3], scratch, stage + 6 * STAGE_BYTES)
        _project(a, layer[DOWN : DOWN + 3], inners, inner, hidden, 0, scratch, stage + 7 * STAGE_BYTES)


LAYERS = Kernel(_run_layers)

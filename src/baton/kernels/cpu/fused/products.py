"""Products with weights, and operations on their outputs."""

from __future__ import annotations

from typing import Any

from baton.jit_cache import jit, jit_inline
from baton.kernels.cpu.elementwise import add_row, gate_row
from baton.kernels.cpu.fused.fields import HIDDEN, INNER, INNERS, NORMED, NUM_ROWS, OPERAND, TILES, X
from baton.kernels.cpu.fused.rows import BF16, ELEMENT_BYTES
from baton.kernels.cpu.fused.stages import STAGE_BYTES, finish, take_piece
from baton.kernels.cpu.gemm.int8_gemm import multiply_narrowed, narrow_piece
from baton.kernels.cpu.gemm.int8_rows import num_narrow_pieces
from baton.kernels.cpu.gemm.small_gemm import multiply_piece, num_pieces, outputs_of
from baton.kernels.cpu.gemm.wide_gemm import HAS_WIDE_PRODUCTS, multiply_widened, num_widen_pieces, widen_piece
from baton.kernels.cpu.simd import CHUNKS, LANES

BLOCK = CHUNKS * LANES
BLOCK_BYTES = BLOCK * ELEMENT_BYTES
# Bytes per thread and row: a block of gates and one of ups.
SCRATCH_BYTES = 2 * BLOCK_BYTES


@jit
def operand(a: Any, int8: Any, num_rows: int, x: int, columns: int, stage: int) -> int:
    """x [T, K] as `multiply` reads it: for int8 whole numbers; without bfloat16 pairs float32."""
    if int8 is None:
        if not HAS_WIDE_PRODUCTS:
            return x
        total = num_widen_pieces(num_rows)
    else:
        total = num_narrow_pieces(num_rows)
    mine = 0
    piece = take_piece(stage)
    while piece < total:
        if int8 is None:
            widen_piece(num_rows, x, columns, piece, a[OPERAND])
        else:
            narrow_piece(a[TILES], num_rows, x, columns, piece, a[OPERAND])
        mine += 1
        piece = take_piece(stage)
    finish(stage, mine, total)
    return a[OPERAND]  # type: ignore[no-any-return]


@jit_inline
def multiply(
    a: Any, int8: Any, num_rows: int, x: int, columns: int, weight: Any, outputs: int, piece: int, out: int,
    out_bytes: int, following: int,
) -> None:  # fmt: skip
    """A piece of an operand times a weight (address, scale, bias). `out`, `following`: as in `multiply_piece`."""
    if int8 is not None:
        multiply_narrowed(
            a[TILES], num_rows, x, columns, weight[0], weight[1], outputs, piece, weight[2], out, out_bytes, following
        )
    elif HAS_WIDE_PRODUCTS:
        multiply_widened(num_rows, x, columns, weight[0], outputs, piece, weight[2], out, out_bytes)
    else:
        multiply_piece(num_rows, x, columns, weight[0], outputs, piece, weight[2], out, out_bytes, following)


@jit
def project(
    a: Any, int8: Any, weight: Any, x: int, columns: int, outputs: int, out: int, scratch: int, stage: int
) -> None:
    """Two stages. x [T, K] times a weight: stored at `out`, or if that is 0 added to the residual stream."""
    num_rows, row_bytes, total, mine = a[NUM_ROWS], outputs * ELEMENT_BYTES, num_pieces(outputs), 0
    x = operand(a, int8, num_rows, x, columns, stage)
    stage += STAGE_BYTES
    piece = take_piece(stage)
    while piece < total:
        at, count = outputs_of(outputs, piece)
        following = take_piece(stage)
        first, first_bytes = (scratch, BLOCK_BYTES) if out == 0 else (out + at * ELEMENT_BYTES, row_bytes)
        multiply(a, int8, num_rows, x, columns, weight, outputs, piece, first, first_bytes, following)
        if out == 0:
            for t in range(num_rows):
                to = a[X] + t * row_bytes + at * ELEMENT_BYTES
                add_row(BF16, to, scratch + t * BLOCK_BYTES, count, to)
        mine += 1
        piece = following
    finish(stage, mine, total)


@jit
def gate(a: Any, int8: Any, weight: Any, scratch: int, stage: int) -> None:
    """Two stages: silu(gate) * up. Pieces are blocks of each."""
    num_rows, inner = a[NUM_ROWS], a[INNER]
    blocks, total, mine = inner // BLOCK, inner // BLOCK, 0
    ups = scratch + num_rows * BLOCK_BYTES
    x = operand(a, int8, num_rows, a[NORMED], a[HIDDEN], stage)
    stage += STAGE_BYTES
    piece = take_piece(stage)
    while piece < total:
        following = take_piece(stage)
        multiply(a, int8, num_rows, x, a[HIDDEN], weight, 2 * inner, piece, scratch, BLOCK_BYTES, blocks + piece)
        then = following if following < total else 2 * blocks
        multiply(a, int8, num_rows, x, a[HIDDEN], weight, 2 * inner, blocks + piece, ups, BLOCK_BYTES, then)
        for t in range(num_rows):
            row = t * BLOCK_BYTES
            to = a[INNERS] + (t * inner + piece * BLOCK) * ELEMENT_BYTES
            gate_row(BF16, scratch + row, ups + row, BLOCK, to)
        mine += 1
        piece = following
    finish(stage, mine, total)

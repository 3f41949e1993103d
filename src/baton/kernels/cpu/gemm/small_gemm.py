"""A few rows of bfloat16 times a packed weight.

The kernel reads oneDNN's blocked copy if its layout is [N / 64][K / 2][64][2], as AVX-512's instruction for
bfloat16 pairs takes it, or with AMX that of `tile_gemm`. Rows are independent. With the spans of oneDNN 3 the bits are
those of oneDNN; `linear` probes that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.extending import intrinsic
from torch import Tensor

from baton.jit_cache import jit
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS, add_products, store_with_bias
from baton.kernels.cpu.gemm.tile_gemm import BLOCK as TILE_BLOCK
from baton.kernels.cpu.gemm.tile_gemm import multiply_tiles
from baton.kernels.cpu.omp import Kernel, arguments, take, threads_for
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, prefetch
from baton.kernels.cpu.tiles import HAS_TILES, TILE_COLUMNS, may_use_tiles

# With more rows oneDNN is as fast.
MAX_ROWS = 64
_BLOCK = CHUNKS * LANES
_ROW_BYTES = 4 * _BLOCK
# Weights worth one more thread.
_PARALLEL_WEIGHTS = 1 << 16
# Columns that oneDNN sums per span: for weights of at most 1,024 columns, and for wider ones.
_SPANS = (512, 1024)
# Rows of a pass: as many as registers can hold sums of.
_PASS_ROWS = 6
# Bytes. One row, or two, outrun the prefetcher of some CPUs (EPYC 9004).
_OUTRUN_BY, _AHEAD = 2, 1024
# Bytes of the next block that a pass of more rows fetches per step.
_FETCHED = 128
_NUM_ARGUMENTS = 8
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _span_products(
    typing_context: Any, num_rows: Any, num_chunks: Any, left: Any, row_bytes: Any, right: Any, steps: Any, span: Any,
    bias: Any, out: Any, out_bytes: Any, ahead: Any,
) -> Any:  # fmt: skip
    """out [num_rows, 16 * num_chunks] = sum over `steps` pairs of left [row, pair] * right [pair], plus bias.

    `row_bytes` and `out_bytes` are row strides; a `bias` of 0 is none. Spans of `span` pairs, and then their sums, are
    summed in order in float32, and rounded once. `num_rows` and `num_chunks` are literals. What is at `ahead` is
    fetched: for one row or two, as much as they read, and for more `_FETCHED` bytes per step.
    """
    rows, chunks = num_rows.literal_value, num_chunks.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, left, row_bytes, right, steps, span, bias, out, out_bytes, ahead = args
        nothing = ir.Constant(_VECTOR, [0.0] * LANES)
        places = [(row, chunk) for row in range(rows) for chunk in range(chunks)]
        totals = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
        sums = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
        for place in places:
            builder.store(nothing, totals[place])
        starts = [builder.add(left, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(rows)]
        one = ir.Constant(_I64, 1)
        num_spans = builder.sdiv(builder.add(steps, builder.sub(span, one)), span)
        with cgutils.for_range(builder, num_spans, intp=_I64) as outer:
            first = builder.mul(outer.index, span)
            last = builder.add(first, span)
            last = builder.select(builder.icmp_signed("<", last, steps), last, steps)
            for place in places:
                builder.store(nothing, sums[place])
            with cgutils.for_range_slice(builder, first, last, one, intp=_I64) as (step, _):
                add_products(builder, sums, starts, right, step)
                outruns = rows <= _OUTRUN_BY
                far = builder.mul(step, ir.Constant(_I64, _ROW_BYTES if outruns else _FETCHED))
                prefetch(builder, builder.add(ahead, far), 4 * LANES * chunks if outruns else _FETCHED)
            for place in places:
                total = builder.fadd(builder.load(totals[place]), builder.load(sums[place]))
                builder.store(total, totals[place])
        store_with_bias(builder, totals, bias, out, out_bytes)
        return context.get_dummy_value()

    return numba.void(num_rows, num_chunks, *[numba.int64] * 9), generate


_products = cast(Callable[..., Any], intrinsic(prefer_literal=True)(_span_products))


def _pass_over(chunks: int) -> Any:
    """One pass of at most `_PASS_ROWS` rows over so many chunks of a block."""

    @jit
    def rows(
        num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, span: int, bias: Any, out: Any,
        out_bytes: int, ahead: Any,
    ) -> None:  # fmt: skip
        if num_rows == 1:
            _products(1, chunks, left, row_bytes, right, steps, span, bias, out, out_bytes, ahead)
        elif num_rows == 2:
            _products(2, chunks, left, row_bytes, right, steps, span, bias, out, out_bytes, ahead)
        elif num_rows == 3:
            _products(3, chunks, left, row_bytes, right, steps, span, bias, out, out_bytes, ahead)
        elif num_rows == 4:
            _products(4, chunks, left, row_bytes, right, steps, span, bias, out, out_bytes, ahead)
        elif num_rows == 5:
            _products(5, chunks, left, row_bytes, right, steps, span, bias, out, out_bytes, ahead)
        else:
            _products(6, chunks, left, row_bytes, right, steps, span, bias, out, out_bytes, ahead)

    return rows


_whole, _half = _pass_over(CHUNKS), _pass_over(CHUNKS // 2)


@jit
def _block(
    num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, span: int, bias: Any, out: Any, out_bytes: int,
    is_half: bool, following: Any,
) -> None:  # fmt: skip
    """A block of outputs, or half of one. The first pass waits for memory; the next two also fetch from `following`."""
    row, passes = 0, (num_rows + _PASS_ROWS - 1) // _PASS_ROWS
    ahead = right + _AHEAD if num_rows <= _OUTRUN_BY else right
    while row < num_rows:
        count = (num_rows - row + passes - 1) // passes
        x, y = left + row * row_bytes, out + row * out_bytes
        if is_half:
            _half(count, x, row_bytes, right, steps, span, bias, y, out_bytes, ahead)
        else:
            _whole(count, x, row_bytes, right, steps, span, bias, y, out_bytes, ahead)
        ahead = following if row == 0 else ahead + steps * _FETCHED
        if ahead == following + steps * _ROW_BYTES:
            ahead, following = right, right
        row, passes = row + count, passes - 1


@jit
def num_pieces(outputs: int) -> int:
    """The last of an odd number of blocks is two pieces, so that two threads finish together."""
    return outputs // _BLOCK + outputs // _BLOCK % 2


@jit
def outputs_of(outputs: int, piece: int) -> tuple[int, int]:
    """A piece's first output, and how many there are."""
    whole = outputs // _BLOCK // 2 * 2
    if piece < whole:
        return piece * _BLOCK, _BLOCK
    half = _BLOCK // 2
    return whole * _BLOCK + (piece - whole) * half, half


@jit
def multiply_piece(
    num_rows: int, x: Any, columns: int, weight: Any, outputs: int, piece: int, bias: Any, out: Any, out_bytes: int,
    following: int,
) -> None:  # fmt: skip
    """A piece of x [T, K] times `weight`, plus bias (0: none). `out`: its first output in row 0. `following`: this
    thread's next piece (none beyond the last)."""
    at, count = outputs_of(outputs, piece)
    bias_at = bias + 2 * at if bias != 0 else bias
    if HAS_TILES:
        then = outputs_of(outputs, following)[0] if following < num_pieces(outputs) else at
        output_bytes, steps, blocks = 2 * columns, columns // TILE_COLUMNS, count // TILE_BLOCK
        right, then = weight + at * output_bytes, weight + then * output_bytes
        multiply_tiles(num_rows, x, 2 * columns, right, steps, bias_at, out, out_bytes, blocks, then)
        return
    steps, span = columns // 2, (_SPANS[1] if columns > _SPANS[1] else _SPANS[0]) // 2
    right = weight + at // _BLOCK * steps * _ROW_BYTES + at % _BLOCK * 4
    then = right
    if following < num_pieces(outputs):
        then = weight + outputs_of(outputs, following)[0] // _BLOCK * steps * _ROW_BYTES
    _block(num_rows, x, 2 * columns, right, steps, span, bias_at, out, out_bytes, count < _BLOCK, then)


def _multiply(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, columns, outputs, x, weight, bias, out = a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    piece = take(arguments)
    while piece < num_pieces(outputs):
        at, _ = outputs_of(outputs, piece)
        following = take(arguments)
        multiply_piece(num_rows, x, columns, weight, outputs, piece, bias, out + 2 * at, 2 * outputs, following)
        piece = following


_MULTIPLY = Kernel(_multiply)


def packed_address(weight: Tensor, packed: Tensor) -> int | None:
    """The address of `packed` [N, K], oneDNN's copy of bfloat16 `weight`. None if the kernel cannot read it: on another
    CPU, for other sizes, or in another layout."""
    outputs, columns = weight.shape
    if weight.dtype is not torch.bfloat16 or outputs % _BLOCK or columns % 2 or not HAS_BF16_PAIRS:
        return None
    operators: Any = torch.ops.mkldnn
    try:
        at, num_bytes = int(operators.data_ptr(packed)), int(operators._nbytes(packed))
    except (AttributeError, RuntimeError):
        return None
    if num_bytes != 2 * outputs * columns or not at:
        return None
    # oneDNN does not report the layout: compare some of the data.
    if HAS_TILES and (columns % TILE_COLUMNS or not may_use_tiles()):
        return None
    half, block = columns // 2, TILE_BLOCK if HAS_TILES else _BLOCK
    stored = np.ctypeslib.as_array((ctypes.c_uint16 * (outputs * columns)).from_address(at)).reshape(-1, half, block, 2)
    plain = weight.view(torch.uint16).numpy().reshape(-1, block, half, 2)
    some = [0, len(stored) // 2, len(stored) - 1]
    return at if np.array_equal(stored[some], plain[some].transpose(0, 2, 1, 3)) else None


def multiply_packed(x: Tensor, at: int, outputs: int, bias: Tensor | None) -> Tensor:
    """x [T, K] times the transposed weight [N, K] at `address` `at`, plus bias [N]: [T, N]. bfloat16, contiguous."""
    num_rows, columns = x.shape
    out = torch.empty(num_rows, outputs, dtype=x.dtype)
    if num_rows:
        bias_at = 0 if bias is None else bias.data_ptr()
        given = arguments(num_rows, columns, outputs, x.data_ptr(), at, bias_at, out.data_ptr())
        _MULTIPLY.call(given, threads_for(outputs * columns, _PARALLEL_WEIGHTS))
    return out

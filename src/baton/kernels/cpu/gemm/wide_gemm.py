"""Products of bfloat16 rows with bfloat16 weights on CPUs without instructions for bfloat16 pairs (x86 with AVX2).

Rows are widened to float32 once, weights in registers. Each output is summed in order of the columns, by fused
multiply-adds: rows have the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.extending import intrinsic
from torch import Tensor

from baton.jit_cache import jit
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS, store_with_bias
from baton.kernels.cpu.gemm.small_gemm import num_pieces, outputs_of
from baton.kernels.cpu.omp import Kernel, arguments, pointer, take, threads_for
from baton.kernels.cpu.scalar import to_f32
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, fma, has_features, load, prefetch, splat

HAS_WIDE_PRODUCTS = not HAS_BF16_PAIRS and has_features("avx2", "fma")
_BLOCK = CHUNKS * LANES
# The most rows of a pass, and those of which it takes 4 and 2 chunks of 16 outputs: sums fill 24 of AVX-512's 32
# registers, or 12 of AVX2's 16.
_TALLEST, _OF_4_CHUNKS, _OF_2_CHUNKS = (12, 6, 12) if has_features("avx512f") else (6, 1, 2)
_HEIGHTS = {
    4: range(1, _OF_4_CHUNKS + 1),
    2: range(1, _OF_2_CHUNKS + 1),
    1: range(_OF_2_CHUNKS + 1, _TALLEST + 1),
}
# How far ahead of its reads a pass fetches weights.
_AHEAD_BYTES = 512
# A step is a pair of columns of 16 outputs.
_STEP_BYTES = 4 * LANES
BF16 = np.uint16(0)
_WIDE_BYTES, _NARROW_BYTES = 4, 2
# Rows that are widened at a time.
_MOST_ROWS = 512
# Rows of a piece of work.
_ROWS_AT_ONCE = 16
# Weights of a product, and numbers of rows to widen, worth one more thread.
_PARALLEL_WEIGHTS, _PARALLEL_NUMBERS = 1 << 16, 1 << 16
_NUM_ARGUMENTS = 8
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def _chunk_products(
    typing_context: Any, num_chunks: Any, num_rows: Any, left: Any, row_bytes: Any, right: Any, steps: Any, bias: Any,
    out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """out [num_rows, 16 * num_chunks] = sum over `steps` pairs of left [row, pair] * right [chunk, pair], plus bias.

    Addresses: `left` of float32; `right`, `bias` (0: none) and `out` of bfloat16. `num_chunks` is a literal.
    """
    chunks = range(num_chunks.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, num_rows, *rest = args
        for height in _HEIGHTS[len(chunks)]:
            with builder.if_then(builder.icmp_signed("==", num_rows, ir.Constant(_I64, height))):
                _generate_pass(builder, range(height), chunks, *rest)
        return context.get_dummy_value()

    return numba.void(num_chunks, *[numba.int64] * 8), generate


def _generate_pass(
    builder: Any, rows: range, chunks: range, left: Any, row_bytes: Any, right: Any, steps: Any, bias: Any, out: Any,
    out_bytes: Any,
) -> None:  # fmt: skip
    places = [(row, chunk) for row in rows for chunk in chunks]
    sums = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
    for place in places:
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), sums[place])
    starts = [builder.add(left, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in rows]
    chunk_bytes = builder.mul(steps, ir.Constant(_I64, _STEP_BYTES))
    chunk_starts = [builder.mul(chunk_bytes, ir.Constant(_I64, chunk)) for chunk in chunks]
    half, high = (splat(builder, ir.Constant(_I32, value)) for value in (16, -(1 << 16)))
    with cgutils.for_range(builder, steps, intp=_I64) as loop:
        here = builder.add(right, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
        offset = builder.mul(loop.index, ir.Constant(_I64, 2 * _WIDE_BYTES))
        for start in chunk_starts:
            prefetch(builder, builder.add(builder.add(here, start), ir.Constant(_I64, _AHEAD_BYTES)), _STEP_BYTES)
        for column in range(2):
            # Loaded anew, which takes a register less than to keep the pairs.
            here = builder.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [here], side_effect=False)
            pairs = [load(builder, builder.add(here, start), 0, _WORDS) for start in chunk_starts]
            vectors = [
                builder.bitcast(builder.and_(pair, high) if column else builder.shl(pair, half), _VECTOR)
                for pair in pairs
            ]
            at = builder.add(offset, ir.Constant(_I64, column * _WIDE_BYTES))
            for row, start in enumerate(starts):
                number = splat(builder, load(builder, start, at, _F32))
                for chunk, vector in enumerate(vectors):
                    total = builder.load(sums[row, chunk])
                    builder.store(fma(builder, number, vector, total), sums[row, chunk])
    store_with_bias(builder, sums, bias, out, out_bytes)


_products = cast(Callable[..., Any], intrinsic(prefer_literal=True)(_chunk_products))


@jit
def _rows(
    num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, bias: Any, out: Any, out_bytes: int, chunks: int
) -> None:
    """One pass, with as many of the 2 or 4 `chunks` at a time as registers can hold."""
    chunk, chunk_bytes = 0, steps * _STEP_BYTES
    while chunk < chunks:
        weights, y = right + chunk * chunk_bytes, out + chunk * LANES * _NARROW_BYTES
        bias_at = bias + chunk * LANES * _NARROW_BYTES if bias != 0 else bias
        if num_rows > _OF_2_CHUNKS:
            _products(1, num_rows, left, row_bytes, weights, steps, bias_at, y, out_bytes)
            chunk += 1
        elif num_rows > _OF_4_CHUNKS or chunks == 2:
            _products(2, num_rows, left, row_bytes, weights, steps, bias_at, y, out_bytes)
            chunk += 2
        else:
            _products(4, num_rows, left, row_bytes, weights, steps, bias_at, y, out_bytes)
            chunk += 4


@jit
def multiply_widened(
    num_rows: int, x: Any, columns: int, weight: Any, outputs: int, piece: int, bias: Any, out: Any, out_bytes: int
) -> None:
    """As `small_gemm.multiply_piece`, of widened rows."""
    at, count = outputs_of(outputs, piece)
    right, row_bytes, row = weight + at * columns * _NARROW_BYTES, columns * _WIDE_BYTES, 0
    bias_at = bias + at * _NARROW_BYTES if bias != 0 else bias
    while row < num_rows:
        more = num_rows - row
        height = min(more, _TALLEST)
        left, y = x + row * row_bytes, out + row * out_bytes
        _rows(height, left, row_bytes, right, columns // 2, bias_at, y, out_bytes, count // LANES)
        row += height


@jit
def num_widen_pieces(num_rows: int) -> int:
    return (num_rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE


@jit
def widen_piece(num_rows: int, x: int, columns: int, piece: int, to: int) -> None:
    """A piece of x [T, K], in float32."""
    first, last = piece * _ROWS_AT_ONCE * columns, min((piece + 1) * _ROWS_AT_ONCE, num_rows) * columns
    source, widened = carray(pointer(x, BF16), (last,)), carray(pointer(to, np.float32(0.0)), (last,))
    for i in range(first, last):
        widened[i] = to_f32(source[i])


def _widen(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, columns, x, to = a[1], a[2], a[3], a[4]
    piece = take(arguments)
    while piece < num_widen_pieces(num_rows):
        widen_piece(num_rows, x, columns, piece, to)
        piece = take(arguments)


def _multiply(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, columns, outputs, x, weight, bias, out = a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    piece = take(arguments)
    while piece < num_pieces(outputs):
        at = outputs_of(outputs, piece)[0] * _NARROW_BYTES
        multiply_widened(num_rows, x, columns, weight, outputs, piece, bias, out + at, outputs * _NARROW_BYTES)
        piece = take(arguments)


_WIDEN, _MULTIPLY = Kernel(_widen), Kernel(_multiply)


class WideWeight:
    """A bfloat16 weight [N, K] as [N / 16, K / 2, 16, 2], zeros up to a whole block of outputs."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: on the CPU, of an even number of columns."""
        self.outputs, self.columns = weight.shape
        padding = -self.outputs % _BLOCK
        # Padding copies, even by nothing.
        padded = F.pad(weight.detach(), (0, 0, 0, padding)) if padding else weight.detach()
        self._data = padded.view(-1, LANES, self.columns // 2, 2).transpose(1, 2).contiguous()

    @property
    def addresses(self) -> tuple[int, int] | None:
        """Addresses of numbers and scales (0: there are none); None if blocks are padded."""
        return None if self.outputs % _BLOCK else (self._data.data_ptr(), 0)

    @property
    def operand_bytes(self) -> int:
        return self.columns * _WIDE_BYTES

    def multiply(self, x: Tensor, bias: Tensor | None, first: int = 0) -> Tensor:
        """x [T, K] times the transposed weight from output `first` on, a multiple of 64, plus bias [N - first]:
        [T, N - first] in bfloat16."""
        padding = -self.outputs % _BLOCK
        if bias is not None and padding:
            bias = F.pad(bias, (0, padding))
        width = self.outputs + padding - first
        x, out = x.contiguous(), torch.empty(len(x), width, dtype=x.dtype)
        weight_at = self._data.data_ptr() + first * self.columns * _NARROW_BYTES
        bias_at = 0 if bias is None else bias.data_ptr()
        for start in range(0, len(x), _MOST_ROWS):
            rows, to = x[start : start + _MOST_ROWS], out[start : start + _MOST_ROWS]
            wide = torch.empty(rows.shape, dtype=torch.float32)
            given = arguments(len(rows), self.columns, rows.data_ptr(), wide.data_ptr())
            _WIDEN.call(given, threads_for(rows.numel(), _PARALLEL_NUMBERS))
            given = arguments(
                len(rows), self.columns, width, wide.data_ptr(), weight_at, bias_at, to.data_ptr()
            )  # fmt: skip
            _MULTIPLY.call(given, threads_for(len(rows) * self.columns * width, _PARALLEL_WEIGHTS))
        return out[:, : self.outputs - first].contiguous() if padding else out

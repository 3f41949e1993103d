"""A small GEMM: a few rows of bfloat16 times a packed weight, limited by memory bandwidth.

The kernel reads oneDNN's own blocked copy if its layout is [N / 64][K / 2][64][2], as AVX-512's instruction for
bfloat16 pairs takes it. Rows are independent. With the spans of oneDNN 3 the bits are those of oneDNN; `linear` probes
that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS, add_products
from baton.kernels.cpu.gemm.passes import Sums, in_passes, num_pieces, outputs_of
from baton.kernels.cpu.jit_cache import jit
from baton.kernels.cpu.omp import Kernel, arguments, take, threads_for
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, prefetch

# Above, oneDNN is as fast.
MAX_ROWS = 64
_BLOCK, _HALF = CHUNKS * LANES, CHUNKS // 2
_ROW_BYTES = 4 * _BLOCK
# Weights per thread.
_PARALLEL_WEIGHTS = 1 << 16
# Columns that oneDNN sums per span: for weights of at most 1,024 columns, and for wider ones.
_SPANS = (512, 1024)
# Bytes. One row, or two, outrun the prefetcher of some CPUs (EPYC 9004).
_OUTRUN_BY, _AHEAD = 2, 1024
# Bytes that a pass of more rows fetches per step. With twice as many, passes wait for memory.
_FETCHED = 128
_NUM_ARGUMENTS = 8
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _add_spans(builder: Any, totals: Sums, starts: list[Any], right: Any, ahead: Any, steps: Any, span: Any) -> None:
    """Spans of `span` pairs of columns, and then their sums, are summed in order in float32."""
    rows, chunks, one = len(starts), len(totals) // len(starts), ir.Constant(_I64, 1)
    sums = {place: cgutils.alloca_once(builder, _VECTOR) for place in totals}
    num_spans = builder.sdiv(builder.add(steps, builder.sub(span, one)), span)
    with cgutils.for_range(builder, num_spans, intp=_I64) as outer:
        first = builder.mul(outer.index, span)
        last = builder.add(first, span)
        last = builder.select(builder.icmp_signed("<", last, steps), last, steps)
        for total in sums.values():
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        with cgutils.for_range_slice(builder, first, last, one, intp=_I64) as (step, _):
            add_products(builder, sums, starts, right, step)
            outruns = rows <= _OUTRUN_BY
            far = builder.mul(step, ir.Constant(_I64, _ROW_BYTES if outruns else _FETCHED))
            prefetch(builder, builder.add(ahead, far), 4 * LANES * chunks if outruns else _FETCHED)
        for place, total in totals.items():
            builder.store(builder.fadd(builder.load(total), builder.load(sums[place])), total)


_products = in_passes(
    _add_spans, 4, _ROW_BYTES, lambda rows: _AHEAD if rows <= _OUTRUN_BY else 0, _ROW_BYTES // _FETCHED
)


@jit
def multiply_piece(
    num_rows: int, x: Any, columns: int, weight: Any, outputs: int, piece: int, bias: Any, out: Any, out_bytes: int,
    following: int,
) -> None:  # fmt: skip
    """A piece of x [T, K] times `weight`, plus bias (0: none). `out`: the address of its first output in row 0.
    `following`: the piece that this thread multiplies next (none beyond the last)."""
    at, count = outputs_of(outputs, piece)
    steps, span = columns // 2, (_SPANS[1] if columns > _SPANS[1] else _SPANS[0]) // 2
    right = weight + at // _BLOCK * steps * _ROW_BYTES + at % _BLOCK * 4
    bias_at = bias + 2 * at if bias != 0 else bias
    then = right
    if following < num_pieces(outputs):
        then = weight + outputs_of(outputs, following)[0] // _BLOCK * steps * _ROW_BYTES
    if count < _BLOCK:
        _products(_HALF, num_rows, x, steps, right, span, bias_at, out, out_bytes, then)
    else:
        _products(CHUNKS, num_rows, x, steps, right, span, bias_at, out, out_bytes, then)


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
    half = columns // 2
    stored = np.ctypeslib.as_array((ctypes.c_uint16 * (outputs * columns)).from_address(at)).reshape(
        -1, half, _BLOCK, 2
    )
    plain = weight.view(torch.uint16).numpy().reshape(-1, _BLOCK, half, 2)
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

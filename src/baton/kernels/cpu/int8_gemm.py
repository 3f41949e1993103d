"""Products of bfloat16 rows with int8 weights that have one scale per output.

An int8 number is exact in bfloat16, so products are exact. Each output is summed in float32 in order of its pairs, then
scaled, whatever the number of rows: rows have the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import torch
import torch.nn.functional as F
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.extending import intrinsic
from torch import Tensor

from baton.kernels.cpu.bf16_dot import BF16_PAIRS, add_loaded_products, store_with_bias
from baton.kernels.cpu.jit_cache import jit
from baton.kernels.cpu.omp import Kernel, arguments, take, threads_for
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, load, splat

_BLOCK = CHUNKS * LANES
_STEP_BYTES = 2 * _BLOCK  # a pair of weights per output of a block
_MOST = 127
# Weights per thread.
_PARALLEL_WEIGHTS = 1 << 17
_NUM_ARGUMENTS = 9
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS, _BYTES = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES), ir.VectorType(_I8, LANES)


def _pairs(builder: Any, at: Any, byte_offset: int) -> Any:
    """16 pairs of bfloat16 from 16 first and 16 second int8 weights. The low halves of their float32 are zero."""
    first, second = (
        builder.bitcast(builder.sitofp(load(builder, at, byte_offset + half, _BYTES), _VECTOR), _WORDS)
        for half in (0, LANES)
    )
    low = builder.lshr(first, splat(builder, ir.Constant(_I32, 16)))
    return builder.bitcast(builder.or_(low, second), BF16_PAIRS)


def _span_products(
    typing_context: Any, num_rows: Any, num_chunks: Any, left: Any, row_bytes: Any, right: Any, steps: Any, scale: Any,
    bias: Any, out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """out [num_rows, 16 * num_chunks] = scale * sum over `steps` pairs of left [row, pair] * right [pair], plus bias.

    `left`, `bias` (0: none) and `out` are addresses of bfloat16, `right` of int8, `scale` of float32; `row_bytes` and
    `out_bytes` are row strides. `num_rows` and `num_chunks` are literals.
    """
    rows, chunks = num_rows.literal_value, num_chunks.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, left, row_bytes, right, steps, scale, bias, out, out_bytes = args
        places = [(row, chunk) for row in range(rows) for chunk in range(chunks)]
        sums = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
        for place in places:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), sums[place])
        starts = [builder.add(left, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(rows)]
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            here = builder.add(right, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
            weights = [_pairs(builder, here, 2 * LANES * chunk) for chunk in range(chunks)]
            add_loaded_products(builder, sums, starts, weights, loop.index)
        scales = [load(builder, scale, 4 * LANES * chunk) for chunk in range(chunks)]
        for place in places:
            builder.store(builder.fmul(builder.load(sums[place]), scales[place[1]]), sums[place])
        store_with_bias(builder, sums, bias, out, out_bytes)
        return context.get_dummy_value()

    return numba.void(num_rows, num_chunks, *[numba.int64] * 8), generate


_products = cast(Callable[..., Any], intrinsic(prefer_literal=True)(_span_products))


@jit
def _block(
    num_rows: int, left: Any, row_bytes: int, right: Any, steps: int, scale: Any, bias: Any, out: Any, out_bytes: int
) -> None:
    """As many rows at once as registers can hold. Twelve rows of half a block widen a weight half as often as six of a
    whole one."""
    row = 0
    while row + 12 <= num_rows:
        x, y = left + row * row_bytes, out + row * out_bytes
        other = bias + 2 * 2 * LANES if bias != 0 else bias
        _products(12, 2, x, row_bytes, right, steps, scale, bias, y, out_bytes)
        _products(
            12, 2, x, row_bytes, right + 4 * LANES, steps, scale + 4 * 2 * LANES, other, y + 2 * 2 * LANES, out_bytes
        )
        row += 12
    while row < num_rows:
        x, y, more = left + row * row_bytes, out + row * out_bytes, num_rows - row
        if more >= 6:
            _products(6, 4, x, row_bytes, right, steps, scale, bias, y, out_bytes)
            row += 6
        elif more >= 4:
            _products(4, 4, x, row_bytes, right, steps, scale, bias, y, out_bytes)
            row += 4
        elif more >= 2:
            _products(2, 4, x, row_bytes, right, steps, scale, bias, y, out_bytes)
            row += 2
        else:
            _products(1, 4, x, row_bytes, right, steps, scale, bias, y, out_bytes)
            row += 1


@jit
def multiply_block(
    num_rows: int, x: Any, columns: int, weight: Any, scale: Any, block: int, bias: Any, out: Any, out_bytes: int
) -> None:
    """x [T, K] times a block of `weight`, plus bias (0: none). `out`: the address of its first output in row 0."""
    steps, at = columns // 2, block * _BLOCK
    bias_at = bias + 2 * at if bias != 0 else bias
    right = weight + block * steps * _STEP_BYTES
    _block(num_rows, x, 2 * columns, right, steps, scale + 4 * at, bias_at, out, out_bytes)


def _multiply(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, columns, blocks, x, weight, scale, bias, out = a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]
    row_bytes = 2 * _BLOCK * blocks
    block = take(arguments)
    while block < blocks:
        multiply_block(num_rows, x, columns, weight, scale, block, bias, out + 2 * _BLOCK * block, row_bytes)
        block = take(arguments)


_MULTIPLY = Kernel(_multiply)


class Int8Weight:
    """A weight [N, K] in int8. The scale of an output is the largest magnitude of its weights over 127."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: bfloat16 on the CPU, finite."""
        self.outputs, self.columns = weight.shape
        wide = F.pad(weight.detach().float(), (0, self.columns % 2, 0, -self.outputs % _BLOCK))
        scale = wide.abs().amax(dim=1) / _MOST
        rounded = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
        # [block, pair, chunk, first or second of a pair, output]
        blocks = rounded.view(-1, CHUNKS, LANES, wide.shape[1] // 2, 2).permute(0, 3, 1, 4, 2)
        self._data, self._scale = blocks.contiguous(), scale.contiguous()

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._scale.nbytes

    @property
    def addresses(self) -> tuple[int, int] | None:
        """Of numbers and scales, for `multiply_block`. None if blocks or pairs are padded."""
        if self.outputs % _BLOCK or self.columns % 2:
            return None
        return self._data.data_ptr(), self._scale.data_ptr()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] times the transposed weight, plus bias [N]: [T, N]. bfloat16."""
        padding = -self.outputs % _BLOCK
        x = F.pad(x, (0, 1)) if self.columns % 2 else x.contiguous()
        if bias is not None and padding:
            bias = F.pad(bias, (0, padding))
        out = torch.empty(len(x), self.outputs + padding, dtype=x.dtype)
        if len(x):
            bias_at = 0 if bias is None else bias.data_ptr()
            given = arguments(
                len(x), x.shape[1], out.shape[1] // _BLOCK, x.data_ptr(), self._data.data_ptr(),
                self._scale.data_ptr(), bias_at, out.data_ptr(),
            )  # fmt: skip
            _MULTIPLY.call(given, threads_for(len(x) * self._data.nbytes, _PARALLEL_WEIGHTS))
        return out[:, : self.outputs].contiguous() if padding else out

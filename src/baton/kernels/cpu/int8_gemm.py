"""Products of bfloat16 rows with int8 weights that have one scale per output and group of columns.

Rows become whole numbers (`int8_rows`): a group's sum is exact. Groups are added in order: rows have the same bits in
every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import torch
import torch.nn.functional as F
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import carray  # type: ignore[attr-defined]
from numba.extending import intrinsic
from torch import Tensor

from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS, store_with_bias
from baton.kernels.cpu.int8_rows import GROUP, GROUP_BYTES, SCALE_AT, SUM_AT, groups_of, narrow_piece, num_narrow_pieces
from baton.kernels.cpu.jit_cache import jit
from baton.kernels.cpu.omp import Kernel, arguments, take, threads_for
from baton.kernels.cpu.simd import CHUNKS, LANES, cgutils, fma, load, load_widened, prefetch, splat
from baton.kernels.cpu.small_gemm import num_pieces, outputs_of

HAS_INT8_PRODUCTS = HAS_BF16_PAIRS and bool(binding.get_host_cpu_features().get("avx512vnni"))
_BLOCK = CHUNKS * LANES
_STEP = 4
_STEP_BYTES = _STEP * _BLOCK
_MOST = 127
# Makes weights unsigned.
_SHIFT = 128
# Per thread.
_PARALLEL_WEIGHTS, _PARALLEL_NUMBERS = 1 << 17, 1 << 16
_AHEAD = 1024
_NUM_ARGUMENTS = 9
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)
_Sums = dict[tuple[int, int], Any]


def _add_steps(builder: Any, parts: dict[int, _Sums], starts: list[Any], weights: Any, ahead: int) -> None:
    """`parts`: sums by the offset of rows' bytes."""
    one = next(iter(parts.values()))
    chunks = len(one) // len(starts)
    function_type = ir.FunctionType(_WORDS, [_WORDS] * 3)
    dot = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512.vpdpbusd.512")
    with cgutils.for_range(builder, ir.Constant(_I64, GROUP // _STEP), intp=_I64) as loop:
        here = builder.add(weights, builder.mul(loop.index, ir.Constant(_I64, _STEP_BYTES)))
        vectors = [load(builder, here, 4 * LANES * chunk, _WORDS) for chunk in range(chunks)]
        offset = builder.mul(loop.index, ir.Constant(_I64, _STEP))
        for row, start in enumerate(starts):
            for part, sums in parts.items():
                four = splat(builder, load(builder, builder.add(start, offset), part, _I32))
                for chunk, vector in enumerate(vectors):
                    total = builder.load(sums[row, chunk])
                    builder.store(builder.call(dot, [total, vector, four]), sums[row, chunk])
        if ahead:
            prefetch(builder, builder.add(here, ir.Constant(_I64, ahead)), 4 * LANES * chunks)


def _group_sums(builder: Any, places: list[tuple[int, int]], starts: list[Any], weights: Any) -> _Sums:
    """Of products, int32. More rows read weights twice, for half the sums."""
    sums = [{place: cgutils.alloca_once(builder, _WORDS) for place in places} for _ in range(2)]
    for place in places:
        builder.store(splat(builder, load(builder, starts[place[0]], SUM_AT, _I32)), sums[0][place])
        builder.store(ir.Constant(_WORDS, [0] * LANES), sums[1][place])
    seven = splat(builder, ir.Constant(_I32, 7))
    high, low = 0, GROUP
    if len(starts) <= 2:
        _add_steps(builder, {high: sums[0], low: sums[1]}, starts, weights, _AHEAD)
        return {
            place: builder.add(builder.shl(builder.load(total), seven), builder.load(sums[1][place]))
            for place, total in sums[0].items()
        }
    _add_steps(builder, {high: sums[0]}, starts, weights, 0)
    for total in sums[0].values():
        builder.store(builder.shl(builder.load(total), seven), total)
    _add_steps(builder, {low: sums[0]}, starts, weights, GROUP * _BLOCK)
    return {place: builder.load(total) for place, total in sums[0].items()}


def _span_products(
    typing_context: Any, num_rows: Any, num_chunks: Any, left: Any, groups: Any, right: Any, scale: Any, bias: Any,
    out: Any, out_bytes: Any,
) -> Any:  # fmt: skip
    """out [num_rows, 16 * num_chunks] = left * right, plus bias (0: none).

    `left`: rows of `groups` groups; `scale`, `bias` and `out` are bfloat16. `num_rows` and `num_chunks` are literals.
    """
    rows, chunks = num_rows.literal_value, num_chunks.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, left, groups, right, scale, bias, out, out_bytes = args
        places = [(row, chunk) for row in range(rows) for chunk in range(chunks)]
        totals = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
        for place in places:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), totals[place])
        row_bytes = builder.mul(groups, ir.Constant(_I64, GROUP_BYTES))
        with cgutils.for_range(builder, groups, intp=_I64) as loop:
            at = builder.add(left, builder.mul(loop.index, ir.Constant(_I64, GROUP_BYTES)))
            starts = [builder.add(at, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(rows)]
            weights = builder.add(right, builder.mul(loop.index, ir.Constant(_I64, GROUP * _BLOCK)))
            sums = _group_sums(builder, places, starts, weights)
            scales_at = builder.add(scale, builder.mul(loop.index, ir.Constant(_I64, 2 * _BLOCK)))
            scales = [
                load_widened(builder, builder.add(scales_at, ir.Constant(_I64, 2 * LANES * chunk)), 2)
                for chunk in range(chunks)
            ]
            for (row, chunk), total in sums.items():
                one = splat(builder, load(builder, starts[row], SCALE_AT, ir.FloatType()))
                scaled = builder.fmul(scales[chunk], one)
                added = fma(builder, builder.sitofp(total, _VECTOR), scaled, builder.load(totals[row, chunk]))
                builder.store(added, totals[row, chunk])
        store_with_bias(builder, totals, bias, out, out_bytes)
        return context.get_dummy_value()

    return numba.void(num_rows, num_chunks, *[numba.int64] * 7), generate


_products = cast(Callable[..., Any], intrinsic(prefer_literal=True)(_span_products))


@jit
def _block(
    num_rows: int, left: Any, groups: int, right: Any, scale: Any, bias: Any, out: Any, out_bytes: int, is_half: bool
) -> None:
    row = 0
    while row < num_rows:
        x, y, more = left + row * groups * GROUP_BYTES, out + row * out_bytes, num_rows - row
        if is_half:
            if more >= 4:
                _products(4, 2, x, groups, right, scale, bias, y, out_bytes)
                row += 4
            else:
                _products(1, 2, x, groups, right, scale, bias, y, out_bytes)
                row += 1
        elif more >= 6:
            _products(6, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 6
        elif more >= 4:
            _products(4, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 4
        elif more >= 2:
            _products(2, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 2
        else:
            _products(1, 4, x, groups, right, scale, bias, y, out_bytes)
            row += 1


@jit
def multiply_narrowed(
    num_rows: int, x: Any, columns: int, weight: Any, scale: Any, outputs: int, piece: int, bias: Any, out: Any,
    out_bytes: int,
) -> None:  # fmt: skip
    """As `small_gemm.multiply_piece`, of narrowed rows."""
    groups = groups_of(columns)
    at, count = outputs_of(outputs, piece)
    block, rest = at // _BLOCK * groups, at % _BLOCK
    right, scales = weight + block * GROUP * _BLOCK + _STEP * rest, scale + 2 * (block * _BLOCK + rest)
    bias_at = bias + 2 * at if bias != 0 else bias
    _block(num_rows, x, groups, right, scales, bias_at, out, out_bytes, count < _BLOCK)


def _narrow(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, columns, x, to = a[1], a[2], a[3], a[4]
    piece = take(arguments)
    while piece < num_narrow_pieces(num_rows):
        narrow_piece(num_rows, x, columns, piece, to)
        piece = take(arguments)


def _multiply(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, columns, outputs, x, weight, scale, bias, out = a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]
    piece = take(arguments)
    while piece < num_pieces(outputs):
        at, _ = outputs_of(outputs, piece)
        multiply_narrowed(num_rows, x, columns, weight, scale, outputs, piece, bias, out + 2 * at, 2 * outputs)
        piece = take(arguments)


_NARROW, _MULTIPLY = Kernel(_narrow), Kernel(_multiply)


class Int8Weight:
    """A weight [N, K] in int8. A scale, in bfloat16, is the largest magnitude of its weights over 127."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: bfloat16 on the CPU, finite."""
        self.outputs, self.columns = weight.shape
        wide = F.pad(weight.detach(), (0, -self.columns % GROUP, 0, -self.outputs % _BLOCK)).float()
        # [block, output, group, column]
        wide = wide.view(-1, _BLOCK, wide.shape[1] // GROUP, GROUP)
        scale = (wide.abs().amax(dim=3) / _MOST).bfloat16()
        wide /= scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        numbers = wide.round_().clamp_(-_MOST, _MOST).add_(_SHIFT).to(torch.uint8)
        # [block, group, step, output, column]
        numbers = numbers.view(*numbers.shape[:3], GROUP // _STEP, _STEP).permute(0, 2, 3, 1, 4)
        self._data, self._scale = numbers.contiguous(), scale.transpose(1, 2).contiguous()

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._scale.nbytes

    @property
    def addresses(self) -> tuple[int, int] | None:
        """Of numbers and scales. None if blocks are padded."""
        if self.outputs % _BLOCK:
            return None
        return self._data.data_ptr(), self._scale.data_ptr()

    @property
    def operand_bytes(self) -> int:
        """Of a row as kernels read it."""
        return groups_of(self.columns) * GROUP_BYTES

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] times the transposed weight, plus bias [N]: [T, N]. bfloat16."""
        padding = -self.outputs % _BLOCK
        x = x.contiguous()
        if bias is not None and padding:
            bias = F.pad(bias, (0, padding))
        out = torch.empty(len(x), self.outputs + padding, dtype=x.dtype)
        if len(x):
            rows = torch.empty(len(x) * groups_of(self.columns) * GROUP_BYTES, dtype=torch.uint8)
            given = arguments(len(x), self.columns, x.data_ptr(), rows.data_ptr())
            _NARROW.call(given, threads_for(x.numel(), _PARALLEL_NUMBERS))
            bias_at = 0 if bias is None else bias.data_ptr()
            given = arguments(
                len(x), self.columns, out.shape[1], rows.data_ptr(), self._data.data_ptr(),
                self._scale.data_ptr(), bias_at, out.data_ptr(),
            )  # fmt: skip
            _MULTIPLY.call(given, threads_for(len(x) * self._data.nbytes, _PARALLEL_WEIGHTS))
        return out[:, : self.outputs].contiguous() if padding else out

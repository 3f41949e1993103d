"""The layout of int8 weights, and the sum over groups of columns.

Rows become whole numbers (`int8_rows`): a group's sum is exact. Groups are added in order: rows have the same bits in
every batch, on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic
from torch import Tensor

from baton.kernels.cpu.bf16_dot import store_with_bias
from baton.kernels.cpu.gemm.int8_rows import GROUP, GROUP_BYTES, SCALE_AT
from baton.kernels.cpu.simd import LANES, cgutils, fma, load, load_widened, splat

_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
Sums = dict[tuple[int, int], Any]
GroupSums = Callable[[Any, int, list[Any], Any], Sums]


@dataclass(frozen=True, slots=True)
class Int8Path:
    """Numbers, plus `shift`, are [panel, group, step, output, column], scales [panel, group, output].

    `outputs` of a panel, `columns` of a step.
    """

    runs_here: bool
    outputs: int
    columns: int
    shift: int
    narrow_piece: Callable[..., None]
    multiply_narrowed: Callable[..., None]

    def packed(self, numbers: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """`numbers` [output, group, column]; `scale` [output, group]."""
        groups = scale.shape[1]
        kept = (numbers + self.shift).to(torch.uint8 if self.shift else torch.int8)
        kept = kept.view(-1, self.outputs, groups, GROUP // self.columns, self.columns).permute(0, 2, 3, 1, 4)
        return kept.contiguous(), scale.view(-1, self.outputs, groups).transpose(1, 2).contiguous()


def products_of(group_sums: GroupSums, outputs: int) -> Callable[..., None]:
    """`group_sums`: generates int32 sums from the number of chunks and the addresses of rows and weights."""

    def span_products(
        typing_context: Any, num_rows: Any, num_chunks: Any, left: Any, groups: Any, right: Any, scale: Any, bias: Any,
        out: Any, out_bytes: Any,
    ) -> Any:  # fmt: skip
        """out [num_rows, 16 * num_chunks] = left * right, plus bias (0: none).

        `num_rows`, `num_chunks`: literals.
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
                weights = builder.add(right, builder.mul(loop.index, ir.Constant(_I64, GROUP * outputs)))
                sums = group_sums(builder, chunks, starts, weights)
                scales_at = builder.add(scale, builder.mul(loop.index, ir.Constant(_I64, 2 * outputs)))
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

    return cast(Callable[..., None], intrinsic(prefer_literal=True)(span_products))

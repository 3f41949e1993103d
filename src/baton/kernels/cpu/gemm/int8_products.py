"""The layout of int8 weights, and the sum over groups of columns.

Rows become whole numbers (`int8_rows`): a group's sum is exact. Groups are added in order: rows have the same bits in
every batch, on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from baton.kernels.cpu.gemm.int8_rows import GROUP, GROUP_BYTES, SCALE_AT
from baton.kernels.cpu.gemm.passes import Sums, in_passes
from baton.kernels.cpu.simd import LANES, cgutils, fma, load, load_widened, splat

_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
GroupSums = Callable[[Any, int, list[Any], Any, Any], Sums]


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


def products_of(group_sums: GroupSums, outputs: int, ahead: Callable[[int], int]) -> Callable[..., None]:
    """`in_passes`, `more`: scales in bfloat16.

    `group_sums`: generates int32 sums from the number of chunks and the addresses of rows, weights and what to fetch.
    """

    def add(builder: Any, totals: Sums, starts: list[Any], right: Any, fetched: Any, groups: Any, scale: Any) -> None:
        chunks = len(totals) // len(starts)
        with cgutils.for_range(builder, groups, intp=_I64) as loop:
            at = builder.mul(loop.index, ir.Constant(_I64, GROUP_BYTES))
            rows = [builder.add(start, at) for start in starts]
            at = builder.mul(loop.index, ir.Constant(_I64, GROUP * outputs))
            sums = group_sums(builder, chunks, rows, builder.add(right, at), builder.add(fetched, at))
            scales_at = builder.add(scale, builder.mul(loop.index, ir.Constant(_I64, 2 * outputs)))
            scales = [
                load_widened(builder, builder.add(scales_at, ir.Constant(_I64, 2 * LANES * chunk)), 2)
                for chunk in range(chunks)
            ]
            for (row, chunk), total in sums.items():
                one = splat(builder, load(builder, rows[row], SCALE_AT, ir.FloatType()))
                scaled = builder.fmul(scales[chunk], one)
                added = fma(builder, builder.sitofp(total, _VECTOR), scaled, builder.load(totals[row, chunk]))
                builder.store(added, totals[row, chunk])

    return in_passes(add, GROUP_BYTES, GROUP * outputs, ahead, 1)

"""Products of each head with its own matrix, batch-invariant if needed: see `linear`."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.layers.linear import (
    BIG_PROBE,
    HEIGHTS,
    TALL,
    blocks,
    cancelling_operands,
    isolate_non_finite,
    matching_heights,
    reads_next_row,
)


def headwise(x_THK: Tensor, weight_HKN: Tensor) -> Tensor:
    """x [T, H, K] times weight [H, K, N], head by head: [T, H, N]."""
    if reads_next_row(x_THK.shape[2], x_THK.dtype, x_THK.device):
        return isolate_non_finite(lambda rows: _headwise(rows, weight_HKN), x_THK)
    return _headwise(x_THK, weight_HKN)


def _headwise(x_THK: Tensor, weight_HKN: Tensor) -> Tensor:
    return torch.bmm(x_THK.contiguous().transpose(0, 1), weight_HKN).transpose(0, 1)


@functools.cache
def _heights(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[int, ...]:
    """See `linear.block_heights`; for a weight [H, K, N] of these strides."""
    generator = torch.Generator().manual_seed(0)
    heads, inner, columns = shape
    heights = [height for height in HEIGHTS if height <= TALL or heads * inner * columns < BIG_PROBE]
    x = torch.randn(heights[0], heads, inner, generator=generator)
    x, numbers = cancelling_operands(x, torch.randn(heads, columns, inner, generator=generator))
    weight = torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(numbers.transpose(1, 2))
    narrow = x.to(device, dtype)
    return matching_heights(lambda block: headwise(block, weight), narrow, heights)


def invariant_headwise(x_THK: Tensor, weight_HKN: Tensor) -> Tensor:
    total, threads = len(x_THK), torch.get_num_threads()
    shape, strides = tuple(weight_HKN.shape), tuple(weight_HKN.stride())
    chosen = blocks(total, _heights(shape, strides, x_THK.dtype, x_THK.device, threads))
    x = F.pad(x_THK, (0, 0, 0, 0, 0, sum(chosen) - total))
    return torch.cat([headwise(block, weight_HKN) for block in torch.split(x, chosen)])[:total]

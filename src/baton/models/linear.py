"""Linear layers, and what makes them batch-invariant.

A GEMM library picks its algorithm by the number of rows, so the same row can come out with other last bits
in another batch (PyTorch, fp32, CPU: 1, 2 and 3 rows differ from 4 and more). With `batch_invariant` rows
go through the GEMM in blocks of fixed heights, the last one padded. Sixteen rows is the definition; the
other heights exist for speed, and are used for a weight's shape only if a probe finds each of their rows
equal to the definition's bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_REFERENCE_HEIGHT = 16
_HEIGHTS = (256, 64, 16, 4)
_PROBE_SHIFTS = (0, 1, 2, 3, 5, 11)
_BIG_PROBE = 1 << 24


@dataclass(frozen=True, slots=True)
class Build:
    """How the tensors of a model are made: dtype, device, and whether rows must be batch-invariant."""

    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter of `shape` that takes no gradient."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


def _in_blocks(x: Tensor, weight: Tensor, height: int) -> Tensor:
    return torch.cat([F.linear(block, weight) for block in torch.split(x, height)])


@functools.cache
def block_heights(rows: int, columns: int, dtype: torch.dtype, device: torch.device, threads: int) -> tuple[int, ...]:
    """Block heights, tallest first, that give every row the same bits for a weight [rows, columns].

    `threads` is part of the key because the library's choice may depend on it. Falls back to single rows,
    which are invariant by themselves, where even the definition's rows depend on their place in the block.
    """
    generator = torch.Generator().manual_seed(0)
    heights = _HEIGHTS if rows * columns < _BIG_PROBE else _HEIGHTS[1:]
    weight = torch.randn(rows, columns, generator=generator).to(device, dtype)
    x = torch.randn(heights[0], columns, generator=generator).to(device, dtype)
    expected = _in_blocks(x, weight, _REFERENCE_HEIGHT)

    def equal(height: int) -> bool:
        return all(
            torch.equal(_in_blocks(x.roll(shift, 0), weight, height), expected.roll(shift, 0))
            for shift in _PROBE_SHIFTS
        )

    if not equal(_REFERENCE_HEIGHT):
        return (1,)
    return tuple(height for height in heights if height == _REFERENCE_HEIGHT or equal(height))


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N], each row independent of all others."""
    heights = block_heights(*weight.shape, weight.dtype, weight.device, torch.get_num_threads())
    total = x.shape[0]
    if total == 0:
        return x.new_empty(0, weight.shape[0])
    smallest = heights[-1]
    missing = -total % smallest
    if missing:
        x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
    pieces, start = [], 0
    for height in heights:
        while x.shape[0] - start >= height:
            pieces.append(F.linear(x[start : start + height], weight))
            start += height
    out = (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:total]
    return out if bias is None else out + bias


class Linear(nn.Module):
    """y = x W^T + b for x [T, in] -> [T, out]. Weight [out, in] as in Hugging Face."""

    def __init__(self, in_features: int, out_features: int, build: Build, bias: bool = False) -> None:
        super().__init__()
        self.weight = build.empty(out_features, in_features)
        self.bias = build.empty(out_features) if bias else None
        self._invariant = build.batch_invariant

    def forward(self, x: Tensor) -> Tensor:
        if self._invariant:
            return invariant_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Several linears of one input as one GEMM; `parts` names them, in order, with their output sizes.

    A checkpoint stores the parts under their own names, beside this module's (see `loader.weight_table`).
    """

    def __init__(self, in_features: int, parts: dict[str, int], build: Build, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), build, bias)
        self.parts = dict(parts)

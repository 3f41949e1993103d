"""What int8 weights and rows keep, their products, and kernels on each path that this CPU can run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cpu.gemm.int8_avx2 import AVX2
from baton.kernels.cpu.gemm.int8_products import Int8Path
from baton.kernels.cpu.gemm.int8_rows import GROUP, GROUP_BYTES, num_narrow_pieces
from baton.kernels.cpu.gemm.int8_tiles import TILES
from baton.kernels.cpu.gemm.int8_vnni import VNNI
from baton.kernels.cpu.gemm.small_gemm import num_pieces, outputs_of
from baton.kernels.cpu.simd import CHUNKS, LANES
from baton.kernels.cpu.tiles import may_use_tiles

BLOCK = CHUNKS * LANES
PATHS = {
    name: path
    for name, path in {"avx2": AVX2, "vnni": VNNI, "tiles": TILES}.items()
    if path.runs_here and (path is not TILES or may_use_tiles())
}


def _in_groups(x: Tensor) -> Tensor:
    return F.pad(x.double(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def whole_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [N, groups, 64] and scales [N, groups, 1] in float64."""
    groups = _in_groups(weight)
    scale = (groups.abs().amax(dim=2, keepdim=True).float() / 127).bfloat16().double()
    return (groups / scale.clamp(min=1e-300)).round().clamp(-127, 127), scale


def whole_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [T, groups, 64] and scales [T, groups, 1] in float64."""
    groups = _in_groups(x)
    exponent = torch.frexp(groups.abs().amax(dim=2, keepdim=True)).exponent
    scale = torch.ldexp(torch.ones_like(groups[..., :1]), exponent - 14)
    return (groups / scale).round(), scale


def kept_weight(weight: Tensor) -> Tensor:
    numbers, scale = whole_weight(weight)
    return (numbers * scale).flatten(1)[:, : weight.shape[1]]


def kept_rows(x: Tensor) -> Tensor:
    numbers, scale = whole_rows(x)
    return (numbers * scale).flatten(1)[:, : x.shape[1]]


def exact_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The bits of every path: exact sums of groups, multiplied and added in float32, in order."""
    rows, row_scales = whole_rows(x)
    numbers, scales = whole_weight(weight)
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for g in range(rows.shape[1]):
        # Below 2^53.
        exact = (rows[:, g] @ numbers[:, g].T).float().double()
        total = (exact * (row_scales[:, g] * scales[:, g].T) + total).float().double()
    if bias is not None:
        total = (total + bias.double()).float()
    return total.bfloat16()


def multiply_on(path: Int8Path, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By the kernels of a path, as fused layers call them; the last block of outputs is padded."""
    (num_rows, columns), outputs = x.shape, len(weight) + -len(weight) % BLOCK
    numbers, scale = whole_weight(F.pad(weight, (0, 0, 0, outputs - len(weight))))
    data, scales = path.packed(numbers.float(), scale[..., 0].bfloat16())
    added = None if bias is None else F.pad(bias, (0, outputs - len(weight)))
    rows = torch.empty(num_rows * numbers.shape[1] * GROUP_BYTES, dtype=torch.uint8)
    out = torch.empty(num_rows, outputs, dtype=torch.bfloat16)
    for piece in range(num_narrow_pieces(num_rows)):
        path.narrow_piece(num_rows, x.data_ptr(), columns, piece, rows.data_ptr())
    for piece in range(num_pieces(outputs)):
        first, _ = outputs_of(outputs, piece)
        path.multiply_narrowed(
            num_rows, rows.data_ptr(), columns, data.data_ptr(), scales.data_ptr(), outputs, piece,
            0 if added is None else added.data_ptr(), out.data_ptr() + 2 * first, 2 * outputs, piece + 1,
        )  # fmt: skip
    return out[:, : len(weight)]

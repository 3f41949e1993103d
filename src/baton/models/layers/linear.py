"""Linear layers with packed weights and batch-invariant rows.

With `Build.quantization` "int8", int8 numbers replace a filled layer's weight (`int8_gemm`); on an x86 CPU without
instructions for bfloat16, a copy for our own products (`wide_gemm`). Otherwise oneDNN's blocked copy, if PyTorch and
the CPU support it; a few rows of bfloat16 bypass oneDNN (`small_gemm`).

A GEMM library picks its algorithm by the number of rows, so a row's last bits can differ between batches. With
`batch_invariant` rows go through the GEMM in padded blocks of fixed heights. Blocks of sixteen rows are the reference.
Faster heights and `small_gemm` are used only if a probe finds their rows bitwise equal.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.cpu.gemm import small_gemm
from baton.kernels.cpu.gemm.int8_gemm import Int8Weight
from baton.kernels.cpu.gemm.wide_gemm import HAS_WIDE_PRODUCTS, WideWeight
from baton.kernels.cpu.simd import CHUNKS, LANES
from baton.kernels.device import aligned_copy
from baton.models.layers.parallel import SINGLE_RANK, Share, TensorRank

# Read at the first product. The default, 1,024 compiled shapes, takes most of a gigabyte with prompts of many lengths.
for _capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_capacity, "128")

_REFERENCE_HEIGHT = 16
HEIGHTS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_PROBE_SHIFTS = (0, 1, 2, 3, 5, 11)
# Rows of a probe of low blocks.
_PROBE_ROWS = 64
# From this many weights on, probing blocks above TALL would take too long.
BIG_PROBE = 1 << 22
TALL = 64
_PACKED_ROWS = 16
_PACKED_DTYPES = (torch.float32, torch.bfloat16)
# Dtypes and shapes that oneDNN has multiplied.
_MULTIPLIED: set[tuple[torch.dtype, torch.Size]] = set()


WeightCut = tuple[int, Share]


@dataclass(frozen=True, slots=True)
class Build:
    """How to build a model for a rank. `quantization` of linear layers' bfloat16 weights: "int8" or None."""

    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False
    ranks: TensorRank = SINGLE_RANK
    quantization: str | None = None

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


def packed(weight: Tensor) -> Tensor | None:
    """oneDNN's blocked copy of `weight` [N, K], or None."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES:
        return None
    # Private operators of PyTorch's compiler.
    operators: Any = torch.ops.mkldnn
    try:
        if weight.dtype is torch.bfloat16 and not operators._is_mkldnn_bf16_supported():
            return None
        blocked = cast(Tensor, operators._reorder_linear_weight(weight, _PACKED_ROWS))
        if (kind := (weight.dtype, weight.shape)) not in _MULTIPLIED:
            operators._linear_pointwise(weight.new_zeros(1, weight.shape[1]), blocked, None, "none", [], "")
            _MULTIPLIED.add(kind)
    except (AttributeError, RuntimeError):
        return None
    return blocked


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]. The weight may be packed."""
    if weight.is_mkldnn:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], ""))
    return F.linear(x, weight, bias)


@functools.cache
def block_heights(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    is_packed: bool = False,
    has_bias: bool = False,
) -> tuple[int, ...]:
    """Block heights, tallest first, that give every row the same bits for a weight [rows, columns].

    The algorithm may depend on `threads`, and with cuBLAS on a bias. Falls back to single rows, which are always
    invariant, if rows depend on their place even in blocks of the reference height.
    """
    heights = [height for height in HEIGHTS if height <= TALL or rows * columns < BIG_PROBE]
    x, weight = _probe(heights[0], rows, columns, dtype, device)
    if is_packed:
        blocked = packed(weight)
        assert blocked is not None
        weight = blocked
    bias = weight[:, 0].contiguous() if has_bias else None
    return matching_heights(lambda block: linear_product(block, weight, bias), x, heights)


def _probe(height: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Operands [height, columns] and [rows, columns] whose products reveal the order of summation."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(height, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    x, weight = cancelling_operands(x, weight)
    return x.to(device, dtype), weight.to(device, dtype)


@functools.cache
def small_gemm_matches(rows: int, columns: int, threads: int) -> bool:
    """Whether `small_gemm` gives each bfloat16 row the bits of the reference, with and without bias."""
    x, weight = _probe(small_gemm.MAX_ROWS, rows, columns, torch.bfloat16, torch.device("cpu"))
    blocked = packed(weight)
    at = None if blocked is None else small_gemm.packed_address(weight, blocked)
    if blocked is None or at is None:
        return False
    for bias in (None, weight[:, 0].contiguous()):
        expected = torch.cat([linear_product(block, blocked, bias) for block in torch.split(x, _REFERENCE_HEIGHT)])
        for height in (1, 2, 4, len(x)):
            products = [small_gemm.multiply_packed(block, at, rows, bias) for block in torch.split(x, height)]
            if not torch.equal(torch.cat(products), expected):
                return False
    return True


def cancelling_operands(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`x` and `weight` [..., K], changed so that products cancel in pairs and a sum consists of rounding errors.

    bfloat16's 8 bits hide the order of most other sums.
    """
    count = x.shape[-1] // 2
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(1))
    first, second = order[:count], order[count : 2 * count]
    x, weight = x.clone(), weight.clone()
    x[..., second], weight[..., second] = x[..., first], -weight[..., first]
    return x, weight


def matching_heights(multiply: Callable[[Tensor], Tensor], x: Tensor, heights: Sequence[int]) -> tuple[int, ...]:
    """Block heights that give each row the reference's bits."""

    def in_blocks(x: Tensor, height: int) -> Tensor:
        return torch.cat([multiply(block) for block in torch.split(x, height)])

    expected = in_blocks(x, _REFERENCE_HEIGHT)

    def equal(height: int) -> bool:
        # A lone row has only one position.
        shifts = _PROBE_SHIFTS if height > 1 else _PROBE_SHIFTS[:1]
        rows, wanted = (part[: max(height, _PROBE_ROWS)] for part in (x, expected))
        return all(torch.equal(in_blocks(rows.roll(shift, 0), height), wanted.roll(shift, 0)) for shift in shifts)

    if not equal(_REFERENCE_HEIGHT):
        return (1,)
    return tuple(height for height in heights if height == _REFERENCE_HEIGHT or equal(height))


def blocks(total: int, heights: tuple[int, ...]) -> list[int]:
    """Block heights for `total` rows. The last block is padded if that costs less than one more block."""
    chosen: list[int] = []
    while total > 0:
        fitting = min((height for height in heights if height >= total), default=0)
        # Padding is cheap: reading the weight limits a short block.
        if fitting and (fitting <= _REFERENCE_HEIGHT or fitting - total <= fitting // 8):
            return [*chosen, fitting]
        below = max((height for height in heights if height <= total), default=heights[-1])
        chosen.append(below)
        total -= below
    return chosen


def invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    total = x.shape[0]
    key = (weight.dtype, x.device, torch.get_num_threads(), weight.is_mkldnn)
    has_bias = bias is not None and x.device.type != "cpu"
    chosen = blocks(total, block_heights(weight.shape[0], weight.shape[1], *key, has_bias=has_bias))
    x = aligned_copy(x)
    if sum(chosen) > total:
        x = F.pad(x, (0, 0, 0, sum(chosen) - total))
    if len(chosen) == 1:
        return linear_product(x, weight, bias)[:total]
    out = x.new_empty(total, weight.shape[0])
    start = 0
    for height in chosen:
        stop = min(start + height, total)
        out[start:stop] = linear_product(aligned_copy(x[start : start + height]), weight, bias)[: stop - start]
        start = stop
    return out


def reads_next_row(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN may read past the end of a row: with AMX it fills tiles of 32 bfloat16 columns with the next row's
    first numbers, times weights of 0. A NaN there would spread.
    """
    return device.type == "cpu" and dtype is torch.bfloat16 and columns % 32 > 0


def isolate_non_finite(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Multiply rows [T, ..., K]. A row that is not finite gives NaN in its own products only."""
    bad_T = ~x.flatten(1).sum(dim=1, dtype=torch.float32).isfinite()
    if not bad_T.any():
        return multiply(x)
    bad = bad_T.view(-1, *[1] * (x.ndim - 1))
    return multiply(x.masked_fill(bad, 0.0)).masked_fill(bad, torch.nan)


class Linear(nn.Module):
    """y = x W^T + b for x [T, in] -> [T, out]. Weight [out, in] as in Hugging Face, None once it is packed.

    `share`: this rank's outputs. `cuts`: for each parameter that ranks share, the dimension and this rank's part.
    """

    weight: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, build: Build, bias: bool = False, share: Share | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.cuts: dict[str, WeightCut] = {} if share is None else {"weight": (0, share), "bias": (0, share)}
        self.weight = build.empty(out_features, in_features)
        self.bias = build.empty(out_features) if bias else None
        self._packed: Tensor | None = None
        # The packed weight's address, for `small_gemm`.
        self._address: int | None = None
        self._is_quantized = build.quantization is not None and build.dtype is torch.bfloat16
        self._is_widened = HAS_WIDE_PRODUCTS and build.dtype is torch.bfloat16 and build.device.type == "cpu"
        # The weight in a layout of Baton's own.
        self._own: Int8Weight | WideWeight | None = None
        self._batch_invariant = build.batch_invariant
        self._product = invariant_product if build.batch_invariant else linear_product
        self._reads_next_row = reads_next_row(in_features, build.dtype, build.device)

    def pack(self) -> None:
        if self.weight is None:
            return
        if self._is_quantized:
            self._own, self.weight = Int8Weight(self.weight), None
        elif self._is_widened and self.in_features % 2 == 0:
            self._own, self.weight = WideWeight(self.weight), None
        elif (blocked := packed(self.weight)) is not None:
            self._address = small_gemm.packed_address(self.weight, blocked)
            self._packed, self.weight = blocked, None

    @property
    def operand_bytes(self) -> int:
        """Bytes of a row as the kernels of `in_place` read it; 0: they read it as it is."""
        return 0 if self._own is None else self._own.operand_bytes

    def in_place(self) -> tuple[int, int, int] | None:
        """Addresses of the packed weight, of int8 scales (0: bfloat16), and of the bias (0: none), for kernels that
        give up to `small_gemm.MAX_ROWS` rows the bits of `forward`. None without such a kernel.
        """
        bias = 0 if self.bias is None else self.bias.data_ptr()
        if self._own is not None:
            addresses = self._own.addresses
            return None if addresses is None else (*addresses, bias)
        return None if self._address is None else (self._address, 0, bias)

    def forward(self, x: Tensor, adds_bias: bool = True) -> Tensor:
        """`adds_bias` false: for partial sums."""
        bias = self.bias if adds_bias else None
        if self._own is not None:
            return self._own.multiply(x, bias)
        if self._address is not None and self._takes(x):
            return small_gemm.multiply_packed(x, self._address, self.out_features, bias)
        weight = self.weight if self._packed is None else self._packed
        assert weight is not None
        if self._reads_next_row:
            return isolate_non_finite(lambda rows: self._product(rows, weight, bias), x)
        return self._product(x, weight, bias)

    def _takes(self, x: Tensor) -> bool:
        if x.shape[0] > small_gemm.MAX_ROWS or x.dtype is not torch.bfloat16 or not x.is_contiguous():
            return False
        return self.few_rows_match()

    def outputs_from(self, x: Tensor, first: int) -> Tensor:
        """Outputs from `first` on, with the bits of `forward`; only they are computed if the weight can be cut."""
        usual = x.dtype is torch.bfloat16 and x.is_contiguous() and first % (CHUNKS * LANES) == 0
        if isinstance(self._own, WideWeight) and usual:
            return self._own.multiply(x, None if self.bias is None else self.bias[first:], first)
        if self._address is None or not usual or not self.few_rows_match():
            return self.forward(x)[:, first:].contiguous()
        bias = None if self.bias is None else self.bias[first:]
        at = self._address + first * self.in_features * x.element_size()
        return small_gemm.multiply_packed(x, at, self.out_features - first, bias)

    def few_rows_match(self) -> bool:
        """Whether few rows may have their kernel: with `batch_invariant`, only if no bits change."""
        if not self._batch_invariant or self._own is not None:
            return True
        return small_gemm_matches(self.out_features, self.in_features, torch.get_num_threads())


class MergedLinear(Linear):
    """Several linears of one input as one GEMM. `parts`: their names, in order, with this rank's part of the outputs.

    A checkpoint stores the parts as siblings of this module (see `filling.weight_table`).
    """

    def __init__(self, in_features: int, parts: dict[str, Share], build: Build, bias: bool = False) -> None:
        super().__init__(in_features, sum(share.length for share in parts.values()), build, bias)
        self.parts = dict(parts)

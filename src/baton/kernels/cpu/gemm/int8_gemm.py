"""Products of bfloat16 rows with int8 weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from baton.jit_cache import jit
from baton.kernels.cpu.gemm.int8_avx2 import AVX2
from baton.kernels.cpu.gemm.int8_rows import GROUP, GROUP_BYTES, groups_of, num_narrow_pieces
from baton.kernels.cpu.gemm.int8_tiles import HAS_INT8_TILES, TILES, takes_tiles
from baton.kernels.cpu.gemm.int8_vnni import VNNI
from baton.kernels.cpu.gemm.small_gemm import num_pieces, outputs_of
from baton.kernels.cpu.omp import Kernel, arguments, take, threads_for
from baton.kernels.cpu.simd import CHUNKS, LANES
from baton.kernels.cpu.tiles import may_use_tiles

_PATH = VNNI if VNNI.runs_here else AVX2
HAS_INT8_PRODUCTS = _PATH.runs_here
_narrow_rows, _multiply_rows = _PATH.narrow_piece, _PATH.multiply_narrowed
_narrow_in_tiles, _multiply_in_tiles = TILES.narrow_piece, TILES.multiply_narrowed
_BLOCK = CHUNKS * LANES
_MOST = 127
# Weights of a product, and numbers of rows to narrow, worth one more thread.
_PARALLEL_WEIGHTS, _PARALLEL_NUMBERS = 1 << 17, 1 << 16
_NUM_ARGUMENTS = 10


@jit
def narrow_piece(tiles: int, num_rows: int, x: int, columns: int, piece: int, to: int) -> None:
    if HAS_INT8_TILES and takes_tiles(num_rows, tiles):
        _narrow_in_tiles(num_rows, x, columns, piece, to)
    else:
        _narrow_rows(num_rows, x, columns, piece, to)


@jit
def multiply_narrowed(
    tiles: int, num_rows: int, x: Any, columns: int, weight: Any, scale: Any, outputs: int, piece: int, bias: Any,
    out: Any, out_bytes: int, following: int,
) -> None:  # fmt: skip
    if HAS_INT8_TILES and takes_tiles(num_rows, tiles):
        _multiply_in_tiles(num_rows, x, columns, weight, scale, outputs, piece, bias, out, out_bytes, following)
    else:
        _multiply_rows(num_rows, x, columns, weight, scale, outputs, piece, bias, out, out_bytes, following)


def _narrow(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    tiles, num_rows, columns, x, to = a[1], a[2], a[3], a[4], a[5]
    piece = take(arguments)
    while piece < num_narrow_pieces(num_rows):
        narrow_piece(tiles, num_rows, x, columns, piece, to)
        piece = take(arguments)


def _multiply(arguments: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    tiles, num_rows, columns, outputs, x = a[1], a[2], a[3], a[4], a[5]
    weight, scale, bias, out = a[6], a[7], a[8], a[9]
    piece = take(arguments)
    while piece < num_pieces(outputs):
        following, to = take(arguments), out + 2 * outputs_of(outputs, piece)[0]
        multiply_narrowed(tiles, num_rows, x, columns, weight, scale, outputs, piece, bias, to, 2 * outputs, following)
        piece = following


_NARROW, _MULTIPLY = Kernel(_narrow), Kernel(_multiply)


class Int8Weight:
    """A weight [N, K] in int8. A scale, in bfloat16, is the largest magnitude of its weights over 127."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: bfloat16 on the CPU, finite."""
        self.outputs, self.columns = weight.shape
        wide = F.pad(weight.detach(), (0, -self.columns % GROUP, 0, -self.outputs % _BLOCK)).float()
        # [output, group, column]
        wide = wide.view(len(wide), -1, GROUP)
        scale = (wide.abs().amax(dim=2) / _MOST).bfloat16()
        wide /= scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        self._data, self._scale = _PATH.packed(wide.round_().clamp_(-_MOST, _MOST), scale)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._scale.nbytes

    @property
    def addresses(self) -> tuple[int, int] | None:
        """Addresses of numbers and scales; None if blocks are padded."""
        if self.outputs % _BLOCK:
            return None
        return self._data.data_ptr(), self._scale.data_ptr()

    @property
    def operand_bytes(self) -> int:
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
            given = arguments(may_use_tiles(), len(x), self.columns, x.data_ptr(), rows.data_ptr())
            _NARROW.call(given, threads_for(x.numel(), _PARALLEL_NUMBERS))
            bias_at = 0 if bias is None else bias.data_ptr()
            given = arguments(
                may_use_tiles(), len(x), self.columns, out.shape[1], rows.data_ptr(), self._data.data_ptr(),
                self._scale.data_ptr(), bias_at, out.data_ptr(),
            )  # fmt: skip
            _MULTIPLY.call(given, threads_for(len(x) * self._data.nbytes, _PARALLEL_WEIGHTS))
        return out[:, : self.outputs].contiguous() if padding else out

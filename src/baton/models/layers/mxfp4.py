"""MXFP4 (OCP Microscaling Formats, version 1.0): blocks of 32 4-bit numbers with one power of two per block."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_BIAS = 127
_NAN = 255
# E2M1: sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Pairs:
    """Joins blocks and scales, which arrive in any order, possibly from two files."""

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> tuple[str, Tensor, Tensor] | None:
        """None for the first of two tensors; for the second the stem of their names, blocks and scales. Raises
        `CheckpointError`.
        """
        stem, ending = name[: -len(BLOCKS)], name[-len(BLOCKS) :]
        other = self._waiting.pop(stem + (SCALES if ending == BLOCKS else BLOCKS), None)
        if other is None:
            self._waiting[name] = tensor
            return None
        blocks, scales = (tensor, other) if ending == BLOCKS else (other, tensor)
        shape = (*scales.shape, _BLOCK_BYTES)
        if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.shape != shape:
            raise CheckpointError(
                f"tensor {stem}{BLOCKS} is {blocks.dtype} {list(blocks.shape)}, which does not go with {stem}{SCALES}, "
                f"{scales.dtype} {list(scales.shape)}"
            )
        if not scales.is_meta and bool((scales == _NAN).any()):
            raise CheckpointError(f"tensor {stem}{SCALES} has a scale that is no number")
        return stem, blocks, scales


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Float32 numbers [..., 32 G] of blocks uint8 [..., G, 16], low half first, and scales uint8 [..., G].

    Exact in bfloat16 within its range.
    """
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1)
    exponents = (scales.int() - _BIAS)[..., None]
    return torch.ldexp(pairs.flatten(-2), exponents).flatten(-2)

"""Small unsigned integers from 32-bit words of quantised checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.errors import CheckpointError

# AWQ: which of eight columns each four bits of a word belong to, lowest first.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """Words int32 [N, M] to numbers int32 [N, M * 32 / bits], lowest bits first."""
    return _numbers(words, bits).flatten(1)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Words int32 [N, M] to numbers int32 [N * 32 / bits, M], lowest bits first."""
    return _numbers(words, bits).transpose(1, 2).flatten(0, 1)


def unpack_awq(words: Tensor) -> Tensor:
    """Words int32 [N, M] to numbers of 4 bits int32 [N, 8 M], in AWQ's order."""
    numbers = _numbers(words, 4)
    return numbers[..., [_AWQ_COLUMNS.index(column) for column in range(8)]].flatten(1)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """[N, M, 32 / bits]."""
    if words.dtype is not torch.int32 or words.dim() != 2:
        raise CheckpointError(f"packed words are {words.dtype} {list(words.shape)}, expected int32 of 2 dimensions")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return torch.bitwise_right_shift(words[..., None], shifts) & ((1 << bits) - 1)

"""CPU kernels of DeepSeek-V4's hyper-connections (mHC, arXiv:2512.24880) and router scores, row by row: others
change no bit.

Shapes: T rows, N streams.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.jit_cache import jit
from baton.kernels.cpu.scalar import as_array, exp32, softplus32

_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)


@jit
def _sigmoid_of(number: Any, scale: Any, base: Any) -> Any:
    return _ONE / (_ONE + exp32(-(number * scale + base)))


@jit
def _divide_by_sums(matrix: Any, eps: Any, by_column: bool) -> None:
    """Divide each column, or each row, of `matrix` [N, N] by its sum + eps."""
    count = len(matrix)
    for i in range(count):
        total = _ZERO
        for j in range(count):
            total += matrix[j, i] if by_column else matrix[i, j]
        for j in range(count):
            if by_column:
                matrix[j, i] /= total + eps
            else:
                matrix[i, j] /= total + eps


@jit
def _weights(mixes: Any, scale: Any, base: Any, rounds: int, eps: Any, pre: Any, post: Any, comb: Any) -> None:
    count = pre.shape[1]
    for t in range(len(mixes)):
        for i in range(count):
            pre[t, i] = _sigmoid_of(mixes[t, i], scale[0], base[i]) + eps
            at = count + i
            post[t, i] = _TWO * _sigmoid_of(mixes[t, at], scale[1], base[at])
            first, peak = (2 + i) * count, np.float32(-np.inf)
            for j in range(count):
                comb[t, i, j] = mixes[t, first + j] * scale[2] + base[first + j]
                # Not max(): a NaN stays one.
                peak = comb[t, i, j] if not comb[t, i, j] <= peak else peak
            total = _ZERO
            for j in range(count):
                comb[t, i, j] = exp32(comb[t, i, j] - peak)
                total += comb[t, i, j]
            for j in range(count):
                comb[t, i, j] = comb[t, i, j] / total + eps
        _divide_by_sums(comb[t], eps, True)
        for _ in range(rounds - 1):
            _divide_by_sums(comb[t], eps, False)
            _divide_by_sums(comb[t], eps, True)


def mixing_weights(
    mixes: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `streams.mixing_weights`, of float32 CPU tensors."""
    rows, count = len(mixes), math.isqrt(mixes.shape[1] + 1) - 1
    pre, post, comb = torch.empty(rows, count), torch.empty(rows, count), torch.empty(rows, count, count)
    given = (as_array(mixes.contiguous()), as_array(scale), as_array(base))
    _weights(*given, rounds, np.float32(eps), as_array(pre), as_array(post), as_array(comb))
    return pre, post, comb


@jit
def _sqrt_softplus(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = np.sqrt(softplus32(x[i]))


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + e^x)) of a float32 CPU tensor."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sqrt_softplus(as_array(x.contiguous()).reshape(-1), as_array(out).reshape(-1))
    return out

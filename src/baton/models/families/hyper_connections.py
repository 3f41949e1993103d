"""Hyper-connections (mHC, arXiv:2512.24880; DeepSeek-V4): the residual is N streams. Each block reads a weighted sum of
them, and adds its output to each by further weights, while a doubly stochastic matrix mixes them.

Shapes: T rows, E hidden size, N streams; the residual [T, N E] is the streams side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from baton.kernels.cpu import streams as streams_cpu
from baton.models.layers.decoder_layer import sigmoid
from baton.models.layers.layernorm import UnitRMSNorm
from baton.models.layers.linear import Build, Linear


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """`rounds`: of Sinkhorn-Knopp (1967). `eps` is added to weights and sums, `norm_eps` to the mean square."""

    count: int
    rounds: int
    eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Mix:
    """How a block's output enters the streams: weights of the output [T, N], and of stream j in stream k [T, j, k]."""

    post: Tensor
    comb: Tensor


class HyperConnection(nn.Module):
    def __init__(self, spec: StreamSpec, hidden: int, build: Build) -> None:
        super().__init__()
        wide = replace(build, dtype=torch.float32, quantization=None)
        self._spec, count = spec, spec.count
        self._norm = UnitRMSNorm(count * hidden, spec.norm_eps, wide)
        self.fn = Linear(count * hidden, (2 + count) * count, wide)
        self.base, self.scale = wide.empty((2 + count) * count), wide.empty(3)

    def read(self, x: Tensor) -> tuple[Tensor, Mix]:
        """Returns the block's input [T, E], and how to add its output."""
        mixes = self.fn(self._norm(x.float()))
        made = streams_cpu.mixing_weights if mixes.device.type == "cpu" else mixing_weights
        pre, post, comb = made(mixes, self.scale, self.base, self._spec.rounds, self._spec.eps)
        return weighted_sum(x, pre), Mix(post, comb)

    def add(self, x: Tensor, out_TE: Tensor, mix: Mix) -> Tensor:
        """Returns the next residual [T, N E]."""
        streams = x.view(len(x), self._spec.count, -1).float()
        total = mix.post[:, :, None] * out_TE[:, None].float()
        for j in range(self._spec.count):
            total = total + mix.comb[:, j, :, None] * streams[:, j, None]
        return total.to(x.dtype).flatten(1)


class StreamHead(nn.Module):
    """The residual [T, N E] as one stream [T, E], before the final norm."""

    def __init__(self, spec: StreamSpec, hidden: int, build: Build) -> None:
        super().__init__()
        wide = replace(build, dtype=torch.float32, quantization=None)
        self._eps = spec.eps
        self._norm = UnitRMSNorm(spec.count * hidden, spec.norm_eps, wide)
        self.fn = Linear(spec.count * hidden, spec.count, wide)
        self.base, self.scale = wide.empty(spec.count), wide.empty(1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.fn(self._norm(x.float())) * self.scale + self.base
        return weighted_sum(x, sigmoid(logits) + self._eps)


def weighted_sum(x: Tensor, weights_TN: Tensor) -> Tensor:
    """[T, E] from the streams [T, N E], summed in order in float32."""
    streams = x.view(len(x), weights_TN.shape[1], -1).float()
    total = weights_TN[:, :1] * streams[:, 0]
    for i in range(1, weights_TN.shape[1]):
        total = total + weights_TN[:, i, None] * streams[:, i]
    return total.to(x.dtype)


def mixing_weights(
    mixes: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of input [T, N] and output [T, N], and of streams in streams [T, N, N], whose rows and columns each sum
    to about 1. `mixes`: projections [T, (2 + N) N]."""
    count = math.isqrt(mixes.shape[1] + 1) - 1
    sizes = [count, count, count * count]
    pre, post, comb = (
        part * factor + offset
        for part, factor, offset in zip(torch.split(mixes, sizes, dim=1), scale, torch.split(base, sizes), strict=True)
    )
    matrix = comb.view(-1, count, count).softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        matrix = matrix / (matrix.sum(dim=2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=1, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), matrix

"""RMSNorm, rounded as each architecture does in Hugging Face."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from baton.kernels.cpu.elementwise import add_rms_norm, rms_norm, rms_norm_fp32
from baton.kernels.cpu.scalar import supports
from baton.kernels.device import has_kernels, triton_rms_norm
from baton.models.config import ModelConfig
from baton.models.layers.linear import Build


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang & Sennrich, 2019): in float32, back to the input's dtype,
    then times the weight.
    """

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(size)
        self._eps, self.eps = eps, np.float32(eps)
        self._on_cpu = supports(build.device, build.dtype)
        self._on_device = has_kernels(build.device.type)

    def forward(self, x: Tensor) -> Tensor:
        if self._on_cpu and x.dtype == self.weight.dtype:
            return rms_norm(x, self.weight, self.eps)
        if self._on_device and x.dtype == self.weight.dtype:
            return triton_rms_norm(x, self.weight, self._eps, None)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(x.dtype)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        same = x.dtype == delta.dtype == self.weight.dtype and x.is_contiguous() and delta.is_contiguous()
        if self._on_cpu and same:
            return add_rms_norm(x, delta, self.weight, self.eps)
        total = x + delta
        return total, self(total)


class Fp32RMSNorm(nn.Module):
    """RMSNorm that multiplies by weight + `offset` in float32 and rounds once. `offset`: 0 in gpt-oss, 1 in Gemma 3."""

    weight: Tensor

    def __init__(self, size: int, eps: float, offset: float, build: Build) -> None:
        super().__init__()
        self.weight = replace(build, dtype=torch.float32).empty(size)
        self._eps, self._offset = eps, offset
        self._on_cpu = supports(build.device, build.dtype)
        self._on_device = has_kernels(build.device.type)

    def forward(self, x: Tensor) -> Tensor:
        if self._on_device:
            return triton_rms_norm(x, self.weight, self._eps, self._offset)
        if self._on_cpu:
            return rms_norm_fp32(x, self.weight, np.float32(self._offset), np.float32(self._eps))
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * (self._offset + self.weight)).to(x.dtype)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = x + delta
        return total, self(total)


class UnitRMSNorm(Fp32RMSNorm):
    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__(size, eps, 0.0, build)
        # No parameter: checkpoints store none.
        del self.weight
        self.weight = torch.ones(size, device=build.device)


def make_norm(config: ModelConfig, size: int, build: Build) -> RMSNorm | Fp32RMSNorm:
    if config.norm_offset is None:
        return RMSNorm(size, config.rms_eps, build)
    return Fp32RMSNorm(size, config.rms_eps, config.norm_offset, build)

"""What int8 weights and rows keep, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cpu.int8_rows import GROUP


def _in_groups(x: Tensor) -> Tensor:
    return F.pad(x.double(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def kept_weight(weight: Tensor) -> Tensor:
    groups = _in_groups(weight)
    scale = (groups.abs().amax(dim=2, keepdim=True).float() / 127).bfloat16().double()
    numbers = (groups / scale.clamp(min=1e-300)).round().clamp(-127, 127)
    return (numbers * scale).flatten(1)[:, : weight.shape[1]]


def kept_rows(x: Tensor) -> Tensor:
    groups = _in_groups(x)
    exponent = torch.frexp(groups.abs().amax(dim=2, keepdim=True)).exponent
    unit = torch.ldexp(torch.ones_like(groups[..., :1]), exponent - 14)
    return ((groups / unit).round() * unit).flatten(1)[:, : x.shape[1]]

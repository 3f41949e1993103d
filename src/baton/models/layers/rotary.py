"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) with the usual frequency scalings.

As in Hugging Face, a head's halves are rotated as (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), products in the
model's dtype. Tables are computed on the host in float64 from float32 angles, so all engines agree bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.errors import CheckpointError
from baton.kernels.cpu.elementwise import rotate_in_place
from baton.kernels.cpu.scalar import supports
from baton.models.config import RopeSpec

_FIRST_ROWS = 4096

Frequencies = tuple[Tensor, float]  # inverse frequencies float32 [R/2], factor on cos and sin


def _base(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(spec: RopeSpec, dim: int) -> Frequencies:
    return _base(spec.theta, dim), 1.0


def _linear(spec: RopeSpec, dim: int) -> Frequencies:
    return _base(spec.theta, dim) / spec.params["factor"], 1.0


def _llama3(spec: RopeSpec, dim: int) -> Frequencies:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, between blended."""
    factor, old_length = spec.params["factor"], spec.params["original_max_position_embeddings"]
    low, high = spec.params["low_freq_factor"], spec.params["high_freq_factor"]
    freq = _base(spec.theta, dim)
    wavelength = 2 * math.pi / freq
    blend = (old_length / wavelength - low) / (high - low)
    blended = (1 - blend) * (freq / factor) + blend * freq
    is_long, is_short = wavelength > old_length / low, wavelength < old_length / high
    return torch.where(is_long, freq / factor, torch.where(is_short, freq, blended)), 1.0


def _yarn(spec: RopeSpec, dim: int) -> Frequencies:
    """YaRN (Peng et al., 2023, arXiv:2309.00071), NTK-by-parts: frequencies with more than `beta_fast` rotations within
    the original length are kept, those with fewer than `beta_slow` divided by `factor`, between blended. `truncate`:
    round the two limits to whole dimensions."""
    factor, old_length = spec.params["factor"], spec.params["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension_of(spec.params.get("beta_fast") or 32.0)
    high = dimension_of(spec.params.get("beta_slow") or 1.0)
    if spec.params.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    freq = _base(spec.theta, dim)
    return (freq / factor) * ramp + freq * (1 - ramp), _yarn_attention_factor(spec)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if "attention_factor" in spec.params:
        return spec.params["attention_factor"]
    weight, weight_all = spec.params.get("mscale"), spec.params.get("mscale_all_dim")
    if weight and weight_all:
        return yarn_mscale(spec, weight) / yarn_mscale(spec, weight_all)
    return yarn_mscale(spec, 1.0)


def yarn_mscale(spec: RopeSpec, weight: float) -> float:
    """YaRN's attention scaling. DeepSeek multiplies the softmax scale by its square, with the weight
    `mscale_all_dim`."""
    factor = spec.params.get("factor", 1.0)
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _proportional(spec: RopeSpec, dim: int) -> Frequencies:
    """Gemma 4: the frequencies of the whole head, of which those after the first `partial_rotary_factor` are 0."""
    freq = _base(spec.theta, dim) / spec.params["factor"]
    freq[int(spec.params["partial_rotary_factor"] * dim // 2) :] = 0.0
    return freq, 1.0


_KINDS: dict[str, Callable[[RopeSpec, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "proportional": _proportional,
    "yarn": _yarn,
}


def _checked(spec: RopeSpec, dim: int, max_position: int) -> Frequencies:
    """Raises `CheckpointError` unless angles and factor are finite."""
    with contextlib.suppress(ArithmeticError, ValueError):
        frequencies, factor = _KINDS[spec.kind](spec, dim)
        if 0 < factor < math.inf and (frequencies * max_position).isfinite().all():
            return frequencies, factor
    given = {"rope_theta": spec.theta, **spec.params}
    raise CheckpointError(f"config.json: rope_parameters: {spec.kind!r} cannot be computed from {given}")


class Rotary:
    """cos/sin tables of R dimensions, grown on demand and shared by layers."""

    def __init__(
        self, spec: RopeSpec, rotary_dim: int, max_position: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises `CheckpointError`."""
        frequencies, self._factor = _checked(spec, rotary_dim, max_position)
        self._frequencies = frequencies.numpy().astype(np.float32)
        self._max_position, self._dtype, self._device = max_position, dtype, device
        self._cos = self._sin = torch.empty(0, len(self._frequencies), dtype=dtype, device=device)
        self._grow(min(_FIRST_ROWS, max_position))

    def _grow(self, rows: int) -> None:
        positions = np.arange(len(self._cos), rows, dtype=np.float32)
        wide = (positions[:, None] * self._frequencies[None, :]).astype(np.float64)

        def extended(table: Tensor, values: np.ndarray) -> Tensor:
            narrow = torch.from_numpy(values.astype(np.float32) * np.float32(self._factor))
            return torch.cat((table, narrow.to(self._dtype).to(self._device)))

        self._cos, self._sin = extended(self._cos, np.cos(wide)), extended(self._sin, np.sin(wide))

    def _reach(self, last: int) -> None:
        rows = len(self._cos)
        if last >= rows:
            # A step waits. On GPUs `at` synchronizes until the table is whole.
            more = rows // 8 if self._device.type == "cpu" else rows
            self._grow(min(max(last + 1, rows + more), max(self._max_position, last + 1)))

    def tables(self, last: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, R/2] up to position `last` at least."""
        self._reach(last)
        return self._cos, self._sin

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) at int64 positions [T], each [T, 1, R/2] in the model's dtype."""
        if len(self._cos) < self._max_position and positions_T.numel():
            self._reach(int(positions_T.max()))
        return self._cos[positions_T].unsqueeze(1), self._sin[positions_T].unsqueeze(1)


def deinterleave(heads_THD: Tensor) -> Tensor:
    """Reorder interleaved pairs (x1, x2), (x1, x2), ... to the halves of `rotate`."""
    return torch.cat((heads_THD[..., 0::2], heads_THD[..., 1::2]), dim=-1)


def rotate(heads_THD: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of the first `count` of contiguous heads [T, H, D], in place, by `Rotary.at`."""
    if supports(heads_THD.device, heads_THD.dtype):
        rotate_in_place(heads_THD, count, cos, sin)
        return heads_THD
    rotated = heads_THD[:, :count, : 2 * cos.shape[-1]]
    first, second = rotated.chunk(2, dim=-1)
    rotated.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return heads_THD

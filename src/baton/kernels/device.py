"""Calls of the Triton kernels for norms and for layers with states. They are imported at the first call, since PyTorch
for CPUs comes without Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Numbers of a state that one program holds in registers.
_STATE_NUMBERS = 4096
_CHANNELS = 128


@functools.cache
def has_kernels(kind: str) -> bool:
    """Whether a kind of device has kernels: CUDA has, with Triton."""
    return kind == "cuda" and importlib.util.find_spec("triton") is not None


@functools.cache
def _kernels(name: str) -> Any:
    return importlib.import_module(f"baton.kernels.triton.{name}")


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None) -> Tensor:
    """RMSNorm over the last dimension. Without an `offset` the norm is rounded to x's dtype, then multiplied by the
    weight; else it is multiplied by weight + `offset` in float32."""
    # A reshaped view may keep its strides.
    rows = aligned_copy(x.reshape(-1, x.shape[-1]).contiguous())
    out = torch.empty_like(rows)
    if len(rows):
        _kernels("rows").rms_norm[len(rows),](
            rows, weight, out, rows.shape[1], eps, offset or 0.0,
            BLOCK=_power_of_two(rows.shape[1]), ROUNDS_FIRST=offset is None, num_warps=4,
        )  # fmt: skip
    return out.view(x.shape)


def square_sums(x: Tensor) -> Tensor:
    """Sums over the last dimension, which stays as 1: float32. Without Triton they may depend on the number of rows."""
    if not has_kernels(x.device.type):
        return x.float().pow(2).sum(-1, keepdim=True)
    rows = aligned_copy(x.float().reshape(-1, x.shape[-1]).contiguous())
    out = rows.new_empty(len(rows))
    if len(rows):
        _kernels("rows").square_sums[len(rows),](rows, out, rows.shape[1], BLOCK=_power_of_two(rows.shape[1]))
    return out.view(*x.shape[:-1], 1)


def aligned_copy(x: Tensor) -> Tensor:
    """Copies `x` on a GPU unless it begins at a multiple of 16 bytes: kernels for other addresses may add in another
    order."""
    return x.clone() if x.device.type == "cuda" and x.data_ptr() % 16 else x


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The request of each of T rows, and the rows after which states are kept, on the device."""

    owner: Tensor
    begins: Tensor
    kept: Tensor
    num_requests: int
    num_kept: int

    @classmethod
    def of(cls, query_start: np.ndarray, kept: np.ndarray, device: torch.device) -> DeviceRows:
        """`query_start` [R + 1]; `kept`: ascending rows."""
        counts = np.diff(query_start)
        numbers = np.full(int(counts.sum()), -1, dtype=np.int32)
        numbers[kept] = np.arange(len(kept), dtype=np.int32)
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        parts = (owner, query_start.astype(np.int32), numbers)
        owners, begins, kept_numbers = (torch.from_numpy(part).to(device) for part in parts)
        return cls(owners, begins, kept_numbers, len(counts), len(kept))


def triton_convolve(rows_TC: Tensor, state: Tensor, weight_KC: Tensor, bias_C: Tensor, where: DeviceRows) -> Tensor:
    """Causal and depthwise, of each request's rows after its `state` [R, C, K - 1], then SiLU: float32."""
    taps, channels = weight_KC.shape
    out = rows_TC.new_empty(len(rows_TC), channels, dtype=torch.float32)
    if len(rows_TC):
        _kernels("recurrences").convolve[len(rows_TC), math.ceil(channels / _CHANNELS)](
            rows_TC, state.contiguous(), weight_KC, bias_C, where.owner, where.begins, out, rows_TC.stride(0), channels,
            TAPS=taps, BLOCK=_CHANNELS,
        )  # fmt: skip
    return out


def triton_gated_delta(
    mixed: Tensor, beta_TH: Tensor, decay: Tensor, state: Tensor, sizes: tuple[int, int, int], where: DeviceRows
) -> tuple[Tensor, Tensor]:
    """[T, H V], and the states [kept, H, K V] after the rows to keep. `sizes`: key heads, K, V. `mixed` float32 [T, 2 J
    K + H V], `decay` [T, H] or [T, H K], `state` float32 [R, H, K V]."""
    key_heads, width, size = sizes
    heads = beta_TH.shape[1]
    out = mixed.new_empty(len(mixed), heads * size)
    kept = state.new_empty(where.num_kept, heads, width * size)
    block_k = _power_of_two(width)
    block_v = min(_power_of_two(size), max(1, _STATE_NUMBERS // block_k))
    _kernels("recurrences").gated_delta[where.num_requests, heads, math.ceil(size / block_v)](
        mixed, beta_TH.contiguous(), decay.contiguous(), state.contiguous(), where.begins, where.kept, out, kept,
        heads, width, size, width**-0.5, 1e-6,
        GROUP=heads // key_heads, BLOCK_K=block_k, BLOCK_V=block_v, BY_CHANNEL=decay.shape[1] > heads, num_warps=4,
    )  # fmt: skip
    return out, kept


def triton_mamba2(
    mixed: Tensor, step_TH: Tensor, decay_TH: Tensor, skip_H: Tensor, state: Tensor, sizes: tuple[int, int, int],
    where: DeviceRows,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[T, H P], and the states [kept, H, N P] after the rows to keep. `sizes`: groups, N, P. `mixed` float32 [T, H P +
    2 G N], `state` float32 [R, H, N P]."""
    groups, width, size = sizes
    heads = step_TH.shape[1]
    out = mixed.new_empty(len(mixed), heads * size)
    kept = state.new_empty(where.num_kept, heads, width * size)
    block_n = _power_of_two(width)
    block_p = min(_power_of_two(size), max(1, _STATE_NUMBERS // block_n))
    _kernels("recurrences").mamba2[where.num_requests, heads, math.ceil(size / block_p)](
        mixed, step_TH.contiguous(), decay_TH.contiguous(), skip_H, state.contiguous(), where.begins, where.kept, out,
        kept, heads, width, size,
        GROUP=heads // groups, BLOCK_N=block_n, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out, kept


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()

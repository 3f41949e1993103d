"""The short causal depthwise convolution and SiLU before a recurrence (Mamba-2, gated delta nets).

Shapes: T rows of R requests, C channels, K taps.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.cpu import causal_conv as causal_conv_cpu
from baton.kernels.cpu.scalar import as_array, supports
from baton.kernels.device import DeviceRows, has_kernels, triton_convolve
from baton.models.layer_cache import ScanRows
from baton.models.layers.linear import Build
from baton.models.layers.parallel import Share


class CausalConv(nn.Module):
    """`parts` names the channels' parts, as in `MergedLinear`. Weight [C, 1, K] as in Hugging Face."""

    def __init__(self, parts: dict[str, Share], taps: int, bias: bool, build: Build) -> None:
        super().__init__()
        self.parts = parts
        channels = sum(share.length for share in parts.values())
        self.weight = build.empty(channels, 1, taps)
        self.bias = build.empty(channels) if bias else None
        self._on_cpu = supports(build.device, build.dtype)
        self._wide: tuple[Tensor, Tensor] | None = None

    def forward(self, rows_TX: Tensor, first: int, state: Tensor, rows: ScanRows) -> tuple[Tensor, Tensor]:
        """Columns `first` .. `first` + C of `rows_TX` after each request's `state` [R, C, K - 1]: float32 [T, C]. Also
        returns the states after the rows `kept`: inputs [len(kept), C, K - 1]."""
        weight, bias = self._parameters32()
        if not self._on_cpu:
            inputs = rows_TX[:, first : first + len(bias)]
            return _convolved(inputs, state, weight, bias, rows), _last_inputs(inputs, state, rows)
        mixed = torch.empty(len(rows_TX), len(bias))
        kept = state.new_empty(len(rows.kept), *state.shape[1:])
        values, inputs, starts = as_array(rows_TX), as_array(state), rows.query_start
        causal_conv_cpu.convolve(values, first, inputs, as_array(weight), as_array(bias), starts, as_array(mixed))
        causal_conv_cpu.last_inputs(values, first, inputs, starts, rows.kept, as_array(kept))
        return mixed, kept

    def _parameters32(self) -> tuple[Tensor, Tensor]:
        if self._wide is None:
            weight = self.weight[:, 0].T.float().contiguous()
            self._wide = weight, torch.zeros_like(weight[0]) if self.bias is None else self.bias.float()
        return self._wide


def _convolved(inputs_TC: Tensor, state: Tensor, weight: Tensor, bias: Tensor, rows: ScanRows) -> Tensor:
    """Tap by tap: a library may round differently for another number of rows."""
    if has_kernels(inputs_TC.device.type):
        where = DeviceRows.of(rows.query_start, rows.kept, inputs_TC.device)
        return triton_convolve(inputs_TC, state, weight, bias, where)
    outs = []
    for r, (start, stop) in enumerate(itertools.pairwise(rows.query_start.tolist())):
        joined = torch.cat((state[r].T, inputs_TC[start:stop])).float()
        total = bias.expand(stop - start, -1)
        for tap, factors in enumerate(weight):
            total = total + joined[tap : tap + stop - start] * factors
        outs.append(F.silu(total))
    return torch.cat(outs)


def _last_inputs(inputs_TC: Tensor, state: Tensor, rows: ScanRows) -> Tensor:
    """The K - 1 inputs up to each of the rows `kept`, earlier steps' from `state`: [len(kept), C, K - 1]."""
    columns, starts = state.shape[2], rows.query_start.astype(np.int64)
    owner = np.searchsorted(starts, rows.kept, side="right") - 1
    at = rows.kept[:, None] - np.arange(columns - 1, -1, -1)
    begins = starts[owner][:, None]
    is_new = at >= begins

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(inputs_TC.device)

    new = inputs_TC[on_device(np.where(is_new, at, 0))]
    old = state[on_device(owner[:, None]), :, on_device(np.where(is_new, 0, at - begins + columns))]
    return torch.where(on_device(is_new)[:, :, None], new, old).transpose(1, 2)

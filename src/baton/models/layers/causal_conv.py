"""The short causal depthwise convolution and SiLU before a recurrence (Mamba-2, gated delta nets).

Shapes: T rows of R requests, C channels, K taps.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.cpu import causal_conv as causal_conv_cpu
from baton.kernels.cpu.scalar import as_array, supports
from baton.models.cache import ScanRows
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
        """Convolve columns `first` .. `first` + C of `rows_TX` after each request's `state` [R, C, K - 1]: float32
        [T, C]. Also returns the states after the rows `kept`, the last K - 1 inputs [len(kept), C, K - 1]."""
        weight, bias = self._parameters32()
        if not self._on_cpu:
            return _on_device(rows_TX[:, first : first + len(bias)], state, weight, bias, rows)
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


def _on_device(inputs_TC: Tensor, state: Tensor, weight: Tensor, bias: Tensor, rows: ScanRows) -> tuple[Tensor, Tensor]:
    outs, states = [], []
    for r, (start, stop) in enumerate(itertools.pairwise(rows.query_start.tolist())):
        here = rows.kept[(rows.kept >= start) & (rows.kept < stop)] - start
        outs.append(convolve(inputs_TC[start:stop], state[r], weight, bias))
        states.append(last_inputs(inputs_TC[start:stop], state[r], torch.from_numpy(here).to(inputs_TC.device)))
    return torch.cat(outs), torch.cat(states)


def convolve(inputs_TC: Tensor, state_CK: Tensor, weight_KC: Tensor, bias_C: Tensor) -> Tensor:
    """Causal depthwise convolution of one request's rows after its state's K - 1 inputs, then SiLU: float32 [T, C]."""
    joined = torch.cat((state_CK, inputs_TC.T), dim=1).float()
    return F.silu(F.conv1d(joined, weight_KC.T[:, None], bias_C, groups=len(joined))).T


def last_inputs(inputs_TC: Tensor, state_CK: Tensor, kept: Tensor) -> Tensor:
    """The K - 1 inputs up to each of the rows `kept`: [len(kept), C, K - 1]."""
    columns = state_CK.shape[1]
    joined = torch.cat((state_CK, inputs_TC.T), dim=1)
    within = kept[:, None] + torch.arange(1, columns + 1, device=kept.device)
    return joined[:, within].transpose(0, 1)

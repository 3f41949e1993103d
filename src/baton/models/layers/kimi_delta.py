"""Kimi Delta Attention (Kimi Linear, arXiv:2510.26692): a gated delta net with a decay for each channel of a key, and
low-rank projections to decays and output gates.

Shapes: T rows of R requests, E hidden size, H heads of D numbers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from baton.kernels.cpu import gated_delta as gated_delta_cpu
from baton.kernels.cpu.scalar import as_array, supports
from baton.kernels.device import square_sums
from baton.models.layer_cache import LayerCache, ScanRows, States
from baton.models.layers.causal_conv import CausalConv
from baton.models.layers.gated_delta import DeltaRule, GatedDeltaSpec
from baton.models.layers.linear import Build, Linear, MergedLinear, WeightCut
from baton.models.layers.parallel import Share
from baton.models.layers.row_linear import RowLinear


class KimiDeltaNet(nn.Module):
    """[T, E] -> [T, E]. Rows of `in_proj`: q, k, v H D each, b H, and the low-rank inputs of decays and gates, D each.
    Tensor ranks share heads. `spec` must have as many key heads as value heads, of one size.
    """

    def __init__(self, spec: GatedDeltaSpec, hidden: int, eps: float, layer_id: int, build: Build) -> None:
        super().__init__()
        self._eps, self._layer_id, self._size = eps, layer_id, spec.key_dim
        self._on_cpu = supports(build.device, build.dtype)
        heads = build.ranks.share(spec.value_heads, "heads of a state")
        self._spec = replace(spec, key_heads=heads.length, value_heads=heads.length)
        wide, low_rank = heads.times(spec.key_dim), Share(0, spec.key_dim, spec.key_dim)
        rows = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), wide), "b_proj": heads}
        rows |= {"f_a_proj": low_rank, "g_a_proj": low_rank}
        self.in_proj = MergedLinear(hidden, rows, build)
        self.conv1d = CausalConv(dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), wide), spec.taps, False, build)
        self.f_b_proj = Linear(spec.key_dim, wide.length, build, share=wide)
        self.g_b_proj = Linear(spec.key_dim, wide.length, build, share=wide)
        self.dt_bias, self.A_log = build.empty(wide.length), build.empty(1, 1, heads.length, 1)
        self.cuts: dict[str, WeightCut] = {"dt_bias": (0, wide), "A_log": (2, heads)}
        self.o_norm = nn.ParameterDict({"weight": build.empty(spec.value_dim)})
        self.o_proj = RowLinear(wide, hidden, build)
        self._rule: DeltaRule | None = None

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        projected: Tensor = self.in_proj(x)
        channels = sum(self._spec.conv_sizes)
        sizes = [channels, self._spec.value_heads, self._size, self._size]
        _, b, f, g = torch.split(projected, sizes, dim=1)
        steps = torch.cat((b, self.f_b_proj(f.contiguous())), dim=1)

        def recurrence(states: States, rows: ScanRows) -> tuple[Tensor, States]:
            conv, matrix = torch.cat(states[:3], dim=1), states[3]
            mixed, kept_conv = self.conv1d(projected, 0, conv, rows)
            out, kept = self._delta_rule()(steps, 0, mixed, matrix, rows, self._on_cpu)
            return out, (*torch.split(kept_conv, list(self._spec.conv_sizes), dim=1), kept)

        gates = self.g_b_proj(g.contiguous())
        return self.o_proj(self._normed(cache.scan(self._layer_id, recurrence), gates))  # type: ignore[no-any-return]

    def _delta_rule(self) -> DeltaRule:
        if self._rule is None:
            self._rule = DeltaRule(self._spec, -self.A_log.float().exp().flatten(), self.dt_bias.float())
        return self._rule

    def _normed(self, o: Tensor, gates: Tensor) -> Tensor:
        weight = self.o_norm["weight"]
        if self._on_cpu:
            out = torch.empty(o.shape, dtype=gates.dtype)
            gated_delta_cpu.sigmoid_gated_norm(
                as_array(o), as_array(gates), as_array(weight), np.float32(self._eps), as_array(out)
            )
            return out
        wide = o.to(weight.dtype).float().view(len(o), -1, self._size)
        normed = wide * torch.rsqrt(square_sums(wide) / self._size + self._eps) * weight.float()
        gated: Tensor = normed.flatten(1) * gates.float().sigmoid()
        return gated.to(weight.dtype)

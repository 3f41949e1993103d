"""The gated delta net (Yang, Kautz & Hatamizadeh, 2024, arXiv:2412.06464): a short convolution, then a recurrence that
replaces what a state holds under a key.

Shapes: T rows of R requests, E hidden size, H value heads of V numbers, J key heads of K numbers, each for H / J value
heads, C = 2 J K + H V channels of the convolution.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.kernels.cpu import gated_delta as gated_delta_cpu
from baton.kernels.cpu.scalar import as_array, supports
from baton.kernels.device import DeviceRows, has_kernels, square_sums, triton_gated_delta
from baton.models.layer_cache import LayerCache, ScanRows, StateLayerSpec, StatePlane, States
from baton.models.layers.causal_conv import CausalConv
from baton.models.layers.linear import Build, MergedLinear, WeightCut
from baton.models.layers.row_linear import RowLinear

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """`value_heads` is a multiple of `key_heads`, else raises `CheckpointError`."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    taps: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads {self.value_heads} is no multiple of linear_num_key_heads "
                f"{self.key_heads}"
            )

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def state_spec(self) -> StateLayerSpec:
        """The last taps - 1 inputs of the convolution, in the model's dtype, and the matrices [H, K V] in float32 (see
        `Mamba2Spec`)."""
        parts = zip(("q", "k", "v"), self.conv_sizes, strict=True)
        conv = [StatePlane(f"conv.{name}", size, self.taps - 1, "channels") for name, size in parts]
        matrix = StatePlane("matrix", self.value_heads, self.key_dim * self.value_dim, "heads", "float32")
        return StateLayerSpec((*conv, matrix))


class GatedDeltaNet(nn.Module):
    """[T, E] -> [T, E]. Rows of `in_proj`: gates H V, q J K, k J K, v H V, b H, a H, in a checkpoint `in_proj_z`,
    `in_proj_q` and so on. Tensor ranks share key heads and their value heads."""

    def __init__(self, spec: GatedDeltaSpec, hidden: int, eps: float, layer_id: int, build: Build) -> None:
        super().__init__()
        self._eps, self._layer_id = eps, layer_id
        self._on_cpu = supports(build.device, build.dtype)
        keys = build.ranks.share(spec.key_heads, "key heads of a state")
        heads = build.ranks.share(spec.value_heads, "value heads of a state")
        self._spec = replace(spec, key_heads=keys.length, value_heads=heads.length)
        key_size, value_size = keys.times(spec.key_dim), heads.times(spec.value_dim)
        channels = {"q": key_size, "k": key_size, "v": value_size}
        rows = {"z": value_size, **channels, "b": heads, "a": heads}
        self.in_proj = MergedLinear(hidden, {f"in_proj_{name}": share for name, share in rows.items()}, build)
        conv_parts = {f"conv1d.{name}": share for name, share in channels.items()}
        self.conv1d = CausalConv(conv_parts, spec.taps, False, build)
        self.dt_bias, self.A_log = build.empty(heads.length), build.empty(heads.length)
        self.cuts: dict[str, WeightCut] = dict.fromkeys(("dt_bias", "A_log"), (0, heads))
        self.norm = nn.ParameterDict({"weight": build.empty(spec.value_dim)})
        self.out_proj = RowLinear(value_size, hidden, build)
        self._rule: DeltaRule | None = None

    def forward(self, x: Tensor, cache: LayerCache) -> Tensor:
        projected: Tensor = self.in_proj(x)

        def recurrence(states: States, rows: ScanRows) -> tuple[Tensor, States]:
            conv, matrix = torch.cat(states[:3], dim=1), states[3]
            mixed, kept_conv = self.conv1d(projected, self._spec.conv_sizes[2], conv, rows)
            first = projected.shape[1] - 2 * self._spec.value_heads
            out, kept = self._delta_rule()(projected, first, mixed, matrix, rows, self._on_cpu)
            return out, (*torch.split(kept_conv, list(self._spec.conv_sizes), dim=1), kept)

        return self.out_proj(self._normed(cache.scan(self._layer_id, recurrence), projected))  # type: ignore[no-any-return]

    def _delta_rule(self) -> DeltaRule:
        if self._rule is None:
            self._rule = DeltaRule(self._spec, -self.A_log.float().exp(), self.dt_bias.float())
        return self._rule

    def _normed(self, o: Tensor, projected: Tensor) -> Tensor:
        weight, size = self.norm["weight"], self._spec.value_dim
        if self._on_cpu:
            out = torch.empty(o.shape, dtype=projected.dtype)
            gated_delta_cpu.gated_norm(
                as_array(o), as_array(projected), as_array(weight), np.float32(self._eps), as_array(out)
            )
            return out
        wide = o.to(weight.dtype).float().view(len(o), -1, size)
        wide = wide * torch.rsqrt(square_sums(wide) / size + self._eps)
        gate = F.silu(projected[:, : o.shape[1]].float())
        scaled: Tensor = (weight * wide.to(weight.dtype)).flatten(1) * gate
        return scaled.to(weight.dtype)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The recurrence (see `kernels.cpu.gated_delta.scan`), on sizes of this rank. float32: the decay rate [H], and
    dt_bias [H], or [H K] with a decay for each channel of a key."""

    spec: GatedDeltaSpec
    rate: Tensor
    dt_bias: Tensor

    def __call__(
        self, projected: Tensor, first: int, mixed: Tensor, matrix: Tensor, rows: ScanRows, on_cpu: bool
    ) -> tuple[Tensor, Tensor]:
        """b and a are the columns of `projected` from `first` on. Returns the output [T, H V], and `matrix`
        [R, H, K V] after the rows `kept`."""
        if not on_cpu:
            return self._by_row(projected[:, first:], mixed, matrix, rows)
        out = torch.empty(len(projected), self.spec.conv_sizes[2])
        kept = matrix.new_empty(len(rows.kept), *matrix.shape[1:])
        gated_delta_cpu.scan(
            as_array(projected), first, as_array(mixed), self.spec.key_heads, as_array(matrix), as_array(self.rate),
            as_array(self.dt_bias), rows.query_start, rows.kept, as_array(out), as_array(kept),
        )  # fmt: skip
        return out, kept

    def _by_row(self, b_a: Tensor, mixed: Tensor, matrix: Tensor, rows: ScanRows) -> tuple[Tensor, Tensor]:
        """Row by row: chunks would round differently from decoding."""
        spec, heads, each = self.spec, self.spec.value_heads, self.spec.value_heads // self.spec.key_heads
        b, a = torch.split(b_a.float(), [heads, len(self.dt_bias)], dim=1)
        beta, steps = b.sigmoid(), F.softplus(a + self.dt_bias)
        decay = (self.rate.repeat_interleave(len(self.dt_bias) // heads) * steps).exp()
        if has_kernels(mixed.device.type):
            where = DeviceRows.of(rows.query_start, rows.kept, mixed.device)
            return triton_gated_delta(mixed, beta, decay, matrix, (spec.key_heads, spec.key_dim, spec.value_dim), where)
        parts = torch.split(mixed, list(spec.conv_sizes), dim=1)
        q, k, v = (part.view(len(part), -1, size) for part, size in zip(parts, _widths(spec), strict=True))
        q, k = (_unit(part).repeat_interleave(each, dim=1) for part in (q, k))
        q, out, states, wanted = q * spec.key_dim**-0.5, torch.empty_like(v), [], set(rows.kept.tolist())
        decay = decay.view(len(decay), heads, -1, 1)
        for r, (start, stop) in enumerate(itertools.pairwise(rows.query_start.tolist())):
            state = matrix[r].view(heads, spec.key_dim, spec.value_dim)
            for t in range(start, stop):
                state = state * decay[t]
                known = (state * k[t][:, :, None]).sum(dim=1)
                state = state + k[t][:, :, None] * ((v[t] - known) * beta[t][:, None])[:, None]
                out[t] = (state * q[t][:, :, None]).sum(dim=1)
                if t in wanted:
                    states.append(state.flatten(1))
        return out.flatten(1), torch.stack(states) if states else matrix[:0]


def _widths(spec: GatedDeltaSpec) -> tuple[int, int, int]:
    return spec.key_dim, spec.key_dim, spec.value_dim


def _unit(x: Tensor) -> Tensor:
    """x divided by its L2 norm over the last dimension."""
    return x * torch.rsqrt(square_sums(x) + _L2_EPS)

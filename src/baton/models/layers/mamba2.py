"""The Mamba-2 layer (Dao & Gu, 2024, arXiv:2405.21060): a short convolution, then a selective state-space recurrence.

Shapes: T rows of R requests, E hidden size, I = H P inner size (H heads of P channels), N state numbers per channel,
G groups of heads that share B and C, C = I + 2 G N channels of the convolution, K its taps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ConfigError
from baton.kernels.cpu import mamba2 as mamba2_cpu
from baton.kernels.cpu.scalar import as_array, supports
from baton.kernels.device import DeviceRows, has_kernels, triton_mamba2
from baton.models.layer_cache import LayerCache, ScanRows, StateLayerSpec, StatePlane, States
from baton.models.layers import mamba2_torch
from baton.models.layers.causal_conv import CausalConv
from baton.models.layers.linear import Build, MergedLinear, WeightCut
from baton.models.layers.parallel import Share, tree_sum
from baton.models.layers.row_linear import RowLinear

# Up to this many rows, row by row is as fast as one chunk.
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """`num_heads` must be a multiple of `num_groups`."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    taps: int
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """x, B and C."""
        return self.inner_size, self.num_groups * self.state_size, self.num_groups * self.state_size

    @property
    def state_spec(self) -> StateLayerSpec:
        """The last K - 1 inputs of the convolution, in the model's dtype, and the recurrent state [H, N P] in float32:
        the rounding of a bfloat16 state would depend on where chunks end."""
        # With one group, each rank needs all of it.
        cut: Literal["channels", "whole"] = "channels" if self.num_groups > 1 else "whole"
        x, b, c = self.conv_sizes
        return StateLayerSpec(
            (
                StatePlane("conv.x", x, self.taps - 1, "channels"),
                StatePlane("conv.B", b, self.taps - 1, cut),
                StatePlane("conv.C", c, self.taps - 1, cut),
                StatePlane("ssm", self.num_heads, self.state_size * self.head_dim, "heads", "float32"),
            )
        )


class _Weight(nn.Module):
    """A norm's weight, as a module for Hugging Face's name."""

    def __init__(self, share: Share, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(share.length)
        self.cuts: dict[str, WeightCut] = {"weight": (0, share)}


def stored_parts(spec: Mamba2Spec) -> dict[str, dict[str, int]]:
    """The parts of each tensor that a checkpoint stores merged, in order, with their rows over all ranks."""
    x, b, c = spec.conv_sizes
    channels = {"x": x, "B": b, "C": c}
    return {"in_proj": {"gate": x, **channels, "dt": spec.num_heads}, "conv1d": channels}


class Mamba2(nn.Module):
    """[T, E] -> [T, E]. Rows of `in_proj`: gate I, x I, B G N, C G N, dt H. The recurrence is in float32. Tensor ranks
    share the heads and their groups of B and C.
    """

    def __init__(self, spec: Mamba2Spec, hidden: int, eps: float, layer_id: int, build: Build) -> None:
        super().__init__()
        self._eps, self._layer_id, self._num_groups = eps, layer_id, spec.num_groups
        self._on_cpu, self._by_row, self._ranks = (
            supports(build.device, build.dtype),
            build.batch_invariant,
            build.ranks,
        )
        heads = build.ranks.share(spec.num_heads, "heads of a state")
        one = Share(0, 1, 1)
        groups = one if spec.num_groups == 1 else build.ranks.share(spec.num_groups, "groups of a state's heads")
        self._spec = spec = replace(spec, num_heads=heads.length, num_groups=groups.length)
        inner, shared = heads.times(spec.head_dim), groups.times(spec.state_size)
        channels = {"x": inner, "B": shared, "C": shared}
        self._split = [inner.length, sum(spec.conv_sizes), heads.length]
        rows = {"gate": inner, **channels, "dt": heads}
        parts = {f"in_proj.{name}": share for name, share in rows.items()}
        self.in_proj = MergedLinear(hidden, parts, build, spec.proj_bias)
        self.conv1d = CausalConv(
            {f"conv1d.{name}": c for name, c in channels.items()}, spec.taps, spec.conv_bias, build
        )
        self.dt_bias, self.A_log, self.D = (build.empty(heads.length) for _ in range(3))
        self.cuts: dict[str, WeightCut] = dict.fromkeys(("dt_bias", "A_log", "D"), (0, heads))
        self.norm = _Weight(inner, build)
        self._norm_pieces = max(build.ranks.num_slices, self._num_groups)
        if self._norm_pieces % build.ranks.num_slices or self._norm_pieces % self._num_groups:
            slices = f"is {build.ranks.num_slices}, which neither divides nor is a multiple of"
            raise ConfigError("reduction_slices", f"{slices} the model's {self._num_groups} groups of a state's heads")
        self.out_proj = RowLinear(inner, hidden, build, spec.proj_bias)
        self._wide: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor, cache: LayerCache) -> Tensor:
        projected: Tensor = self.in_proj(x)

        def recurrence(states: States, rows: ScanRows) -> tuple[Tensor, States]:
            conv, ssm = torch.cat(states[:3], dim=1), states[3]
            mixed, kept_conv = self.conv1d(projected, self._split[0], conv, rows)
            run = self._scan_cpu if self._on_cpu else self._scan_torch
            out, kept_ssm = run(projected, mixed, ssm, rows)
            return out, (*torch.split(kept_conv, list(self._spec.conv_sizes), dim=1), kept_ssm)

        y = cache.scan(self._layer_id, recurrence)
        return self.out_proj(self._normed(y, projected))  # type: ignore[no-any-return]

    def _normed(self, y: Tensor, projected: Tensor) -> Tensor:
        if self._ranks.num_slices > 1:
            return self._normed_in_pieces(y, projected)
        weight, groups = self.norm.weight, self._num_groups
        if not self._on_cpu:
            return mamba2_torch.gated_norm(y, projected[:, : y.shape[1]], weight, groups, self._eps)
        normed = torch.empty(y.shape, dtype=projected.dtype)
        mamba2_cpu.gated_norm(
            as_array(y), as_array(projected), as_array(weight), groups, np.float32(self._eps), as_array(normed)
        )
        return normed

    def _normed_in_pieces(self, y: Tensor, projected: Tensor) -> Tensor:
        """Sums squares in pieces of a row, as many for any number of ranks."""
        weight, ranks, groups = self.norm.weight, self._ranks, self._num_groups
        own, each = self._norm_pieces // ranks.size, self._norm_pieces // groups
        gated = torch.empty(y.shape, dtype=torch.float32, device=y.device)
        sums = torch.empty(len(y), own, dtype=torch.float32, device=y.device)
        if self._on_cpu:
            mamba2_cpu.gated_squares(as_array(y), as_array(projected), as_array(gated), as_array(sums))
        else:
            torch.mul(y, F.silu(projected[:, : y.shape[1]].float()), out=gated)
            sums = gated.view(len(y), own, -1).pow(2).sum(-1)
        pieces = torch.cat(tuple(ranks.gather(sums)), dim=1).view(len(y), groups, each)
        mean = tree_sum(pieces.unbind(-1)) / (y.shape[1] * ranks.size // groups)
        factors = (1.0 / torch.sqrt(mean + self._eps)).repeat_interleave(each, dim=1)
        factors = factors[:, ranks.rank * own : (ranks.rank + 1) * own].contiguous()
        if not self._on_cpu:
            normed = (gated.view(len(y), own, -1) * factors[:, :, None]).flatten(1)
            return (weight.float() * normed).to(weight.dtype)
        out = torch.empty(y.shape, dtype=projected.dtype)
        mamba2_cpu.scale_rows(as_array(gated), as_array(factors), as_array(weight), as_array(out))
        return out

    def _parameters32(self) -> tuple[Tensor, ...]:
        if self._wide is None:
            self._wide = -self.A_log.float().exp(), self.dt_bias.float(), self.D.float()
        return self._wide

    def _scan_cpu(self, projected: Tensor, mixed: Tensor, ssm: Tensor, rows: ScanRows) -> tuple[Tensor, Tensor]:
        rate, dt_bias, skip = (as_array(part) for part in self._parameters32())
        inner, channels, _ = self._split
        out, kept = torch.empty(len(projected), inner), ssm.new_empty(len(rows.kept), *ssm.shape[1:])
        mamba2_cpu.scan(
            as_array(projected), inner + channels, as_array(mixed), self._spec.num_groups, as_array(ssm), rate,
            dt_bias, skip, rows.query_start, rows.kept, as_array(out), as_array(kept),
        )  # fmt: skip
        return out, kept

    def _scan_torch(self, projected: Tensor, mixed: Tensor, ssm: Tensor, rows: ScanRows) -> tuple[Tensor, Tensor]:
        spec = self._spec
        rate, dt_bias, skip = self._parameters32()
        dt = F.softplus(projected[:, -self._split[2] :].float() + dt_bias)
        if has_kernels(mixed.device.type):
            where = DeviceRows.of(rows.query_start, rows.kept, mixed.device)
            sizes = spec.num_groups, spec.state_size, spec.head_dim
            return triton_mamba2(mixed, dt, (dt * rate).exp(), skip, ssm, sizes, where)
        outs, ssms = [], []
        for r, (start, stop) in enumerate(itertools.pairwise(rows.query_start.tolist())):
            kept_here = rows.kept[(rows.kept >= start) & (rows.kept < stop)] - start
            kept = torch.from_numpy(kept_here).to(projected.device)
            x, b, c = torch.split(mixed[start:stop], list(spec.conv_sizes), dim=1)
            x = x.view(len(x), spec.num_heads, -1)
            per_head = spec.num_heads // spec.num_groups
            b, c = (part.view(len(x), spec.num_groups, -1).repeat_interleave(per_head, dim=1) for part in (b, c))
            scan = mamba2_torch.by_row if self._by_row or len(x) <= _FEW_ROWS else mamba2_torch.by_chunk
            step = dt[start:stop]
            state = ssm[r].view(spec.num_heads, spec.state_size, -1)
            y, states = scan(x * step[:, :, None], step * rate, b, c, state, kept)
            outs.append((y + x * skip[:, None]).flatten(1))
            ssms.append(states.flatten(2))
        return torch.cat(outs), torch.cat(ssms)

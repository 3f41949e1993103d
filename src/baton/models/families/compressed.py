"""DeepSeek-V4's attention (2026): a window of tokens, and compressed entries of all tokens before.

One head is key and value. An entry is a mean of `rate` tokens, weighted per channel by a softmax over the tokens; with
overlap also of the `rate` tokens before, by other projections. An indexer may choose among the entries, by its own
smaller ones. Rotation is undone on the output, since values are rotated too.

Shapes: T rows, E hidden size, Q low-rank size of queries, H heads of D numbers, G groups of heads, R the rotated part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.layer_cache import (
    ENTRY,
    INDEX,
    OPEN,
    TOKEN,
    Compressed,
    IndexRows,
    LayerCache,
    PartsLayerSpec,
    TokenPart,
    WindowRows,
)
from baton.models.layers.headwise import headwise, invariant_headwise
from baton.models.layers.layernorm import UnitRMSNorm, make_norm
from baton.models.layers.linear import Build, Linear, MergedLinear
from baton.models.layers.parallel import Share
from baton.models.layers.rotary import Rotary
from baton.models.layers.row_linear import RowLinear
from baton.models.layers.specs import IndexSpec


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """`rate` 0: only a window. `overlaps`: an entry also covers the tokens of the one before."""

    head_dim: int
    window: int
    query_rank: int
    num_groups: int
    group_rank: int
    rate: int = 0
    overlaps: bool = False
    index: IndexSpec | None = None

    @property
    def sizes(self) -> dict[str, int]:
        return {ENTRY: self.head_dim, **({INDEX: self.index.head_dim} if self.index is not None else {})}

    @property
    def kept(self) -> PartsLayerSpec:
        tokens = TokenPart(((TOKEN, self.head_dim),), self.window)
        if not self.rate:
            return PartsLayerSpec((tokens,))
        # Values and gates, for this entry and with overlap for the next.
        parts = 1 + self.overlaps
        opened = TokenPart(((OPEN, 2 * parts * sum(self.sizes.values())),), parts * self.rate)
        return PartsLayerSpec((tokens, opened, TokenPart(tuple(self.sizes.items()), rate=self.rate)))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last R numbers of heads [T, H, D], as interleaved pairs, by `Rotary.at`. In float32."""
    size = 2 * cos.shape[-1]
    first, second = x[..., -size::2].float(), x[..., x.shape[-1] - size + 1 :: 2].float()
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-size], turned.to(x.dtype)), dim=-1)


class Compressor(nn.Module):
    """Entries of `size` numbers."""

    def __init__(self, size: int, spec: CompressedSpec, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.size, self.rate, self._overlaps = size, spec.rate, spec.overlaps
        width = size * (1 + spec.overlaps)
        part = Share(0, width, width)
        self.kv_gate = MergedLinear(config.hidden_size, {"kv_proj": part, "gate_proj": part}, build)
        self.position_bias = replace(build, dtype=torch.float32).empty(spec.rate, width)
        self.kv_norm = make_norm(config, size, build)

    def entries(self, windows: Sequence[Tensor], cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """[N, size] from N windows of outputs of `kv_gate`, rotated by the entries' (cos, sin)."""
        mixed = torch.stack([self._mixed(*window.chunk(2, dim=1)) for window in windows])
        return rotate_pairs(self.kv_norm(mixed)[:, None], *cos_sin)[:, 0]

    def _mixed(self, values: Tensor, gates: Tensor) -> Tensor:
        """One window at a time: sums of one shape have the same bits."""
        if self._overlaps:
            # The first half of the numbers is for the tokens before, if any, the second for the window's own.
            before, bias = len(values) - self.rate, self.position_bias
            earlier = gates[:before, : self.size] + bias[:before, : self.size]
            gates = torch.cat((earlier, gates[before:, self.size :] + bias[:, self.size :]))
            values = torch.cat((values[:before, : self.size], values[before:, self.size :]))
        else:
            gates = gates + self.position_bias
        return (values * gates.float().softmax(dim=0).to(values.dtype)).sum(dim=0)


class EntryIndexer(nn.Module):
    """Scores entries by its own smaller ones. Replicated on all tensor ranks; weights of heads are in float32."""

    def __init__(self, spec: CompressedSpec, config: ModelConfig, build: Build) -> None:
        super().__init__()
        assert spec.index is not None
        self._index = spec.index
        self.q_b_proj = Linear(spec.query_rank, spec.index.num_heads * spec.index.head_dim, build)
        self.weights_proj = Linear(config.hidden_size, spec.index.num_heads, replace(build, dtype=torch.float32))
        self.compressor = Compressor(spec.index.head_dim, spec, config, build)

    def rows(self, x: Tensor, low_rank: Tensor, cos_sin: tuple[Tensor, Tensor]) -> IndexRows:
        index = self._index
        q = self.q_b_proj(low_rank).view(len(x), index.num_heads, index.head_dim)
        weights = self.weights_proj(x.float()) * (index.num_heads * index.head_dim) ** -0.5
        return IndexRows(rotate_pairs(q, *cos_sin), None, weights, index.top_k)


class GroupedLinear(nn.Module):
    """Projects each group of heads by itself, [T, G, in] -> [T, G out]. Tensor ranks share groups."""

    def __init__(self, in_features: int, out_features: int, groups: Share, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(groups.length * out_features, in_features)
        self.cuts = {"weight": (0, groups.times(out_features))}
        self._num_groups = groups.length
        self._product: Callable[[Tensor, Tensor], Tensor] = invariant_headwise if build.batch_invariant else headwise

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(self._num_groups, -1, x.shape[2]).transpose(1, 2)
        return self._product(x, weight).flatten(1)


class CompressedAttention(nn.Module):
    """[T, E] -> [T, E]. The decoder sets `rotary` of entries, which layers share."""

    rotary: Rotary

    def __init__(self, spec: CompressedSpec, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        size, heads_of_group = config.hidden_size, config.num_heads // spec.num_groups
        groups = build.ranks.share(spec.num_groups, "groups of attention heads")
        heads = groups.times(heads_of_group)
        self._layer_id, self._spec, self._heads, self._groups = layer_id, spec, heads.length, groups.length
        q_size = heads.times(spec.head_dim)
        self.q_a_proj = Linear(size, spec.query_rank, build)
        self.q_a_norm = make_norm(config, spec.query_rank, build)
        self.q_b_proj = Linear(spec.query_rank, q_size.length, build, share=q_size)
        self._q_b_norm = UnitRMSNorm(spec.head_dim, config.rms_eps, build)
        self.kv_proj = Linear(size, spec.head_dim, build)
        self.kv_norm = make_norm(config, spec.head_dim, build)
        self.sinks = replace(build, dtype=torch.float32).empty(heads.length)
        self.cuts = {"sinks": (0, heads)}
        self.o_a_proj = GroupedLinear(heads_of_group * spec.head_dim, spec.group_rank, groups, build)
        self.o_b_proj = RowLinear(groups.times(spec.group_rank), size, build)
        self.compressor = Compressor(spec.head_dim, spec, config, build) if spec.rate else None
        self.indexer = EntryIndexer(spec, config, build) if spec.index is not None else None

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        spec, (cos, sin) = self._spec, cos_sin
        low_rank = self.q_a_norm(self.q_a_proj(x))
        q = rotate_pairs(self._q_b_norm(self.q_b_proj(low_rank).view(len(x), self._heads, -1)), cos, sin)
        kept = rotate_pairs(self.kv_norm(self.kv_proj(x))[:, None], cos, sin)[:, 0]
        compressed = self._compressed(x, low_rank, cos_sin)
        rows = WindowRows(q, kept, spec.head_dim**-0.5, spec.window, self.sinks, compressed)
        out = rotate_pairs(cache.attend_window(self._layer_id, rows), cos, -sin)
        grouped = self.o_a_proj(out.reshape(len(x), self._groups, -1))
        return self.o_b_proj(grouped)  # type: ignore[no-any-return]

    def _compressed(self, x: Tensor, low_rank: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Compressed | None:
        compressor, indexer = self.compressor, self.indexer
        if compressor is None:
            return None
        compressors: dict[str, Compressor] = {ENTRY: compressor}
        if indexer is not None:
            compressors[INDEX] = indexer.compressor
        opened = [one.kv_gate(x) for one in compressors.values()]
        widths = [part.shape[1] for part in opened]

        def compress(windows: Sequence[Tensor], numbers_N: Tensor) -> Mapping[str, Tensor]:
            at = self.rotary.at(numbers_N * self._spec.rate)
            parts = zip(*(torch.split(window, widths, dim=1) for window in windows), strict=True)
            return {name: one.entries(part, at) for (name, one), part in zip(compressors.items(), parts, strict=True)}

        overlap = self._spec.rate * self._spec.overlaps
        index = None if indexer is None else indexer.rows(x, low_rank, cos_sin)
        return Compressed(self._spec.rate, overlap, torch.cat(opened, dim=1), compress, index)

"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): the cache holds one latent and one rotated key per
token, for all heads.

Shapes: T rows, S kept rows, H heads, C latent, R rotated part of a query or key, N unrotated part, V value, D = N + R,
W = C + R.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig, RopeSpec
from baton.models.layer_cache import Chosen, LatentRows, LayerCache
from baton.models.layers.headwise import headwise, invariant_headwise
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build, Linear, isolate_non_finite, reads_next_row
from baton.models.layers.rotary import deinterleave, rotate, yarn_mscale
from baton.models.layers.row_linear import RowLinear
from baton.models.layers.specs import LatentSpec

# As in transformers, which does not use rms_norm_eps.
_LATENT_EPS = 1e-6


class LatentProjection(nn.Module):
    """Projects latents to each head's keys and values: a `LatentHeads` with weight [H * (N + V), C]."""

    def __init__(self, spec: LatentSpec, num_heads: int, build: Build) -> None:
        super().__init__()
        heads = build.ranks.share(num_heads, "attention heads")
        self.weight = build.empty(heads.length * (spec.nope_dim + spec.value_dim), spec.latent_dim)
        self.cuts = {"weight": (0, heads.times(spec.nope_dim + spec.value_dim))}
        self.value_dim, self.always_absorbed = spec.value_dim, build.batch_invariant
        self._num_heads, self._nope, self._latent = heads.length, spec.nope_dim, spec.latent_dim
        self._headwise = invariant_headwise if build.batch_invariant else headwise

    def expand(self, kept_SW: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope = kept_SW[:, : self._latent], kept_SW[:, self._latent :]
        if reads_next_row(self._latent, latent.dtype, latent.device):
            expanded = isolate_non_finite(lambda rows: F.linear(rows, self.weight), latent)
        else:
            expanded = F.linear(latent, self.weight)
        expanded = expanded.view(len(kept_SW), self._num_heads, -1)
        shared = rope[:, None].expand(-1, self._num_heads, -1)
        return torch.cat((expanded[..., : self._nope], shared), dim=-1), expanded[..., self._nope :]

    def absorb(self, q_THD: Tensor) -> Tensor:
        return torch.cat(
            (self._headwise(q_THD[..., : self._nope], self._by_head[:, : self._nope]), q_THD[..., self._nope :]), dim=-1
        )

    def values(self, latent_THC: Tensor) -> Tensor:
        return self._headwise(latent_THC, self._by_head[:, self._nope :].transpose(1, 2))

    @property
    def _by_head(self) -> Tensor:
        return self.weight.view(self._num_heads, -1, self._latent)


class LatentAttention(nn.Module):
    """A layer's latent attention: [T, in_features] -> [T, hidden]. `in_features`: as in `decoder_layer.Attention`.
    `config.latent` must be set."""

    writes = True

    def __init__(self, config: ModelConfig, layer_id: int, build: Build, in_features: int | None = None) -> None:
        super().__init__()
        spec, size = config.latent, in_features or config.hidden_size
        assert spec is not None
        heads = build.ranks.share(config.num_heads, "attention heads")
        self._layer_id, self._heads, self._spec = layer_id, heads.length, spec
        self._scale = (spec.nope_dim + spec.rope_dim) ** -0.5 * _yarn_scale(config.rope)
        q_size = heads.times(spec.nope_dim + spec.rope_dim)
        if spec.query_rank is None:
            self.q_proj = Linear(size, q_size.length, build, share=q_size)
        else:
            self.q_a_proj = Linear(size, spec.query_rank, build, config.qkv_bias)
            self.q_a_layernorm = RMSNorm(spec.query_rank, _LATENT_EPS, build)
            self.q_b_proj = Linear(spec.query_rank, q_size.length, build, share=q_size)
        self.kv_a_proj_with_mqa = Linear(size, spec.latent_dim + spec.rope_dim, build, config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(spec.latent_dim, _LATENT_EPS, build)
        self.kv_b_proj = LatentProjection(spec, config.num_heads, build)
        self.o_proj = RowLinear(heads.times(spec.value_dim), config.hidden_size, build, config.o_bias)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        spec = self._spec
        low_rank = None if spec.query_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        chosen = self._chosen(x, low_rank, cos_sin, cache)
        q = self.q_proj(x) if low_rank is None else self.q_b_proj(low_rank)
        q_nope, q_rope = q.view(len(x), self._heads, -1).split([spec.nope_dim, spec.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([spec.latent_dim, spec.rope_dim], dim=-1)
        # The shared key is rotated as one more head.
        ropes = self._rotated(torch.cat((q_rope, k_rope[:, None]), dim=1), cos_sin)
        q = torch.cat((q_nope, ropes[:, :-1]), dim=-1)
        rows = LatentRows(q, self.kv_a_layernorm(latent), ropes[:, -1], self._scale, self.kv_b_proj, chosen)
        out = cache.attend_latent(self._layer_id, rows)
        return self.o_proj(out.reshape(len(x), -1))  # type: ignore[no-any-return]

    def write(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> None:
        """As `decoder_layer.Attention.write`."""
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self._spec.latent_dim, self._spec.rope_dim], dim=-1)
        rope = self._rotated(k_rope[:, None].contiguous(), cos_sin)
        cache.write_latent(self._layer_id, self.kv_a_layernorm(latent), rope[:, 0])

    def _rotated(self, ropes: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """The rotated parts [T, N, R] of queries and the key."""
        return rotate(deinterleave(ropes) if self._spec.is_interleaved else ropes, ropes.shape[1], *cos_sin)

    def _chosen(
        self, x: Tensor, low_rank: Tensor | None, cos_sin: tuple[Tensor, Tensor], cache: LayerCache
    ) -> Chosen | None:
        """Choose keys from the input [T, E] and the queries' low-rank projection [T, Q]."""
        return None


def _yarn_scale(rope: RopeSpec) -> float:
    """YaRN's factor on the attention scores (arXiv:2405.04434, 3.1.4)."""
    weight = rope.params.get("mscale_all_dim", 0.0)
    return yarn_mscale(rope, weight) ** 2 if weight else 1.0

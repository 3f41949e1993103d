"""Grouped-query attention whose output is multiplied by sigmoid(gate) (Qwen3-Next, Qwen3.5; arXiv:2505.06708)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.layer_cache import Attend, AttnRows, LayerCache
from baton.models.layers.decoder_layer import sigmoid
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build, MergedLinear
from baton.models.layers.rotary import rotate
from baton.models.layers.row_linear import RowLinear


class GatedAttention(nn.Module):
    """[T, E] -> [T, E].

    `q_proj` makes each head's query, then its gate. Queries and keys are normed.
    """

    writes = True

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        self._layer_id, self._head_dim, self._scale = layer_id, config.head_dim, config.head_dim**-0.5
        heads = build.ranks.share(config.num_heads, "attention heads")
        kv_heads = build.ranks.kv_heads(config.num_kv_heads)
        self._heads, self._kv_heads = heads.length, kv_heads.length
        kv_size = kv_heads.times(config.head_dim)
        parts = {"q_proj": heads.times(2 * config.head_dim), "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, build, config.qkv_bias)
        self.q_norm = make_norm(config, config.head_dim, build)
        self.k_norm = make_norm(config, config.head_dim, build)
        self.o_proj = RowLinear(heads.times(config.head_dim), config.hidden_size, build, config.o_bias)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        projected = self.qkv_proj(x)
        sizes = [2 * self._heads * self._head_dim, *[self._kv_heads * self._head_dim] * 2]
        queries, keys, values = projected.split(sizes, dim=1)
        q, gate = queries.view(len(x), self._heads, 2, self._head_dim).unbind(dim=2)
        k = keys.view(len(x), self._kv_heads, self._head_dim)
        heads = rotate(torch.cat((self.q_norm(q), self.k_norm(k)), dim=1), self._heads + self._kv_heads, *cos_sin)
        q, k = heads.split_with_sizes([self._heads, self._kv_heads], dim=1)
        v = values.reshape(len(x), self._kv_heads, self._head_dim)
        out = attend(self._layer_id, AttnRows(q, k, v, self._scale))
        return self.o_proj((out * sigmoid(gate.float()).to(x.dtype)).reshape(len(x), -1))  # type: ignore[no-any-return]

    def write(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> None:
        """As `decoder_layer.Attention.write`."""
        heads = self.qkv_proj.outputs_from(x, 2 * self._heads * self._head_dim)
        keys, values = heads.view(len(x), 2 * self._kv_heads, self._head_dim).chunk(2, dim=1)
        cache.write(self._layer_id, rotate(self.k_norm(keys), self._kv_heads, *cos_sin), values)

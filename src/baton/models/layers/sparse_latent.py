"""Latent attention to chosen tokens (DeepSeek Sparse Attention: DeepSeek-V3.2, 2025; GLM-5).

An indexer with its own keys scores all tokens; attention is to the best. Published kernels also rotate the index keys
by a Hadamard matrix and quantise them, which changes no exact score; like transformers, we do not.

Shapes: T rows, E hidden size, Q low-rank size of queries, H index heads, D index head size, R its rotated part.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ConfigError
from baton.models.config import ModelConfig
from baton.models.layer_cache import Chosen, IndexRows, LayerCache
from baton.models.layers.latent import LatentAttention
from baton.models.layers.linear import Build, Linear
from baton.models.layers.rotary import deinterleave, rotate
from baton.models.layers.specs import IndexSpec

_NORM_EPS = 1e-6


class SparseLatentAttention(LatentAttention):
    """Latent attention to chosen keys. Raises `ConfigError` for a pipeline stage whose first layer shares another's
    choice."""

    writes = False

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__(config, layer_id, build)
        assert config.latent is not None
        spec = config.latent.index
        assert spec is not None
        stage = build.ranks.stage
        if spec.is_shared[layer_id] and stage.count > 1 and layer_id == stage.layers(config.num_layers).start:
            why = f"is {stage.count}, and stage {stage.index} would begin with layer {layer_id}, which has no indexer"
            raise ConfigError("pipeline_parallel_size", why)
        self.indexer = None if spec.is_shared[layer_id] else Indexer(spec, config, build)

    def _chosen(
        self, x: Tensor, low_rank: Tensor | None, cos_sin: tuple[Tensor, Tensor], cache: LayerCache
    ) -> Chosen | None:
        if self.indexer is not None:
            assert low_rank is not None
            cache.choose(self._layer_id, self.indexer(x, low_rank, cos_sin))
        assert cache.chosen is not None
        return cache.chosen


class Indexer(nn.Module):
    """[T, E] and [T, Q] -> `IndexRows`. Replicated on all tensor ranks. Weights of heads are in float32."""

    def __init__(self, spec: IndexSpec, config: ModelConfig, build: Build) -> None:
        super().__init__()
        latent, size = config.latent, config.hidden_size
        assert latent is not None
        assert latent.query_rank is not None
        self._spec, self._rope_dim = spec, latent.rope_dim
        self.wq_b = Linear(latent.query_rank, spec.num_heads * spec.head_dim, build)
        self.wk = Linear(size, spec.head_dim, build)
        self.k_norm = nn.ParameterDict({"weight": build.empty(spec.head_dim), "bias": build.empty(spec.head_dim)})
        self.weights_proj = Linear(size, spec.num_heads, replace(build, dtype=torch.float32))

    def forward(self, x: Tensor, low_rank: Tensor, cos_sin: tuple[Tensor, Tensor]) -> IndexRows:
        spec = self._spec
        q = self.wq_b(low_rank).view(len(x), spec.num_heads, spec.head_dim)
        k = F.layer_norm(self.wk(x), (spec.head_dim,), self.k_norm["weight"], self.k_norm["bias"], _NORM_EPS)
        # The key is rotated as one more head.
        heads = torch.cat((q, k[:, None]), dim=1)
        if spec.is_interleaved:
            rotated, rest = heads[..., : self._rope_dim], heads[..., self._rope_dim :]
            heads = torch.cat((deinterleave(rotated), rest), dim=-1)
        heads = rotate(heads, spec.num_heads + 1, *cos_sin)
        weights = self.weights_proj(x.float()) * (spec.num_heads * spec.head_dim) ** -0.5
        return IndexRows(heads[:, :-1], heads[:, -1], weights, spec.top_k)

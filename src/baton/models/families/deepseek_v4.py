"""The layers of DeepSeek-V4 (2026). Shapes: T rows, E hidden size, N streams of the residual [T, N E]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.families.compressed import CompressedAttention, CompressedSpec
from baton.models.families.hyper_connections import HyperConnection, StreamSpec
from baton.models.layer_cache import LayerCache
from baton.models.layers.decoder_layer import MLP
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build
from baton.models.layers.moe import Experts, HashRouter, Router


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config(ModelConfig):
    """`attention`, `is_hashed`: by layer. `limit`: gates and ups of MLPs are clamped to it."""

    attention: tuple[CompressedSpec, ...]
    is_hashed: tuple[bool, ...]
    streams: StreamSpec
    limit: float


class V4Layer(nn.Module):
    """Attention, then experts, each read from the streams and added to them."""

    def __init__(self, config: V4Config, layer_id: int, build: Build) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = CompressedAttention(config.attention[layer_id], config, layer_id, build)
        self.mlp = V4MoE(config, config.is_hashed[layer_id], build)
        self.input_layernorm = make_norm(config, size, build)
        self.post_attention_layernorm = make_norm(config, size, build)
        self.attn_hc = HyperConnection(config.streams, size, build)
        self.ffn_hc = HyperConnection(config.streams, size, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache, *token_ids_T: Tensor) -> Tensor:
        read, mix = self.attn_hc.read(x)
        x = self.attn_hc.add(x, self.self_attn(self.input_layernorm(read), cos_sin, cache), mix)
        read, mix = self.ffn_hc.read(x)
        return self.ffn_hc.add(x, self.mlp(self.post_attention_layernorm(read), *token_ids_T), mix)


class ClampedMLP(MLP):
    """SwiGLU of gates clamped to at most `limit` and ups to +-`limit`: [T, E] -> [T, E]."""

    def __init__(self, hidden: int, intermediate: int, limit: float, build: Build) -> None:
        super().__init__(hidden, intermediate, False, build)
        self._limit = limit

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return super().gated(torch.cat((gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)), dim=1))


class V4MoE(nn.Module):
    """Routed experts and a shared one, [T, E] -> [T, E]. A hashed layer's forward also takes the rows' token ids."""

    def __init__(self, config: V4Config, is_hashed: bool, build: Build) -> None:
        super().__init__()
        spec, hidden, limit = config.moe, config.hidden_size, config.limit
        assert spec is not None
        self._is_hashed = is_hashed
        if is_hashed:
            spec = replace(spec, has_choice_bias=False)
            self.gate: Router = HashRouter(spec, hidden, config.vocab_size, build)
        else:
            self.gate = Router(spec, hidden, build)
        size = spec.intermediate_size
        self.experts = Experts(lambda: ClampedMLP(hidden, size, limit, build), spec.num_experts, hidden, build)
        self.shared_experts = ClampedMLP(hidden, spec.shared_size, limit, build) if spec.shared_size else None

    def forward(self, x: Tensor, *token_ids_T: Tensor) -> Tensor:
        chosen = cast(HashRouter, self.gate).choose_for(x, *token_ids_T) if self._is_hashed else self.gate.choose(x)
        out = self.experts.weighted_sum(x, *chosen)
        return out if self.shared_experts is None else out + self.shared_experts(x)

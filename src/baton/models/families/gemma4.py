"""The layers of Gemma 4 (Google, 2026) and of its assistant. Shapes: T rows, E hidden size, P size of per-layer inputs.

Windowed and full layers differ in size and number of heads. Queries and keys are normed with a weight, values without;
scores have no scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from baton.kernels.cpu.scalar import supports
from baton.models.architectures.gemma3 import GeluMLP, gelu_gate
from baton.models.config import ModelConfig
from baton.models.layer_cache import AttnRows, KVLayerSpec, LayerCache
from baton.models.layers.layernorm import UnitRMSNorm, make_norm
from baton.models.layers.linear import Build, Linear, MergedLinear
from baton.models.layers.moe import Experts, row_sum
from baton.models.layers.rotary import rotate
from baton.models.layers.row_linear import RowLinear

# The assistant sees one key more than a windowed row of the target.
LOOKBACK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """`full_head_dim`, `full_kv_heads`: of layers without a window. `sources[l]`: the layer whose keys and values layer
    l attends to, l itself if it has its own. `mlp_sizes`: by layer. `k_is_v`: the values of full layers are their keys,
    before norm and rotation. `per_layer_size`: P, 0 for none. `softcap`: logits are tanh(x / softcap) * softcap."""

    full_head_dim: int
    full_kv_heads: int
    sources: tuple[int, ...]
    mlp_sizes: tuple[int, ...]
    k_is_v: bool
    per_layer_size: int
    softcap: float | None

    def spec(self, layer_id: int) -> KVLayerSpec:
        """The KV of layer `layer_id`, or of the layer it shares with."""
        window = self.windows[layer_id]
        if window is None:
            return KVLayerSpec(self.full_kv_heads, self.full_head_dim, None)
        return KVLayerSpec(self.num_kv_heads, self.head_dim, window, LOOKBACK)


class Gemma4Attention(nn.Module):
    """[T, E] -> [T, E], with own keys and values or another layer's."""

    def __init__(self, config: Gemma4Config, layer_id: int, build: Build) -> None:
        super().__init__()
        spec = config.spec(layer_id)
        self._source, self._window, self._size = config.sources[layer_id], spec.window, spec.head_dim
        self._is_own = self._source == layer_id
        heads = build.ranks.share(config.num_heads, "attention heads")
        kv_heads = build.ranks.kv_heads(spec.num_kv_heads)
        self._heads, self._kv_heads = heads.length, kv_heads.length
        q_size, kv_size = heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        parts = {"q_proj": q_size}
        self._k_is_v = config.k_is_v and spec.window is None
        if self._is_own:
            parts |= {"k_proj": kv_size} if self._k_is_v else {"k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, build, config.qkv_bias)
        self.q_norm = make_norm(config, spec.head_dim, build)
        self.k_norm = make_norm(config, spec.head_dim, build) if self._is_own else None
        self.v_norm = UnitRMSNorm(spec.head_dim, config.rms_eps, build)
        self.o_proj = RowLinear(q_size, config.hidden_size, build, config.o_bias)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self._size)
        if self.k_norm is None:
            q = rotate(self.q_norm(heads), self._heads, *cos_sin)
            out = cache.attend_kept(self._source, q, 1.0, self._window)
            return self.o_proj(out.reshape(len(x), -1))  # type: ignore[no-any-return]
        q, k, *values = heads.split_with_sizes([self._heads] + [self._kv_heads] * (1 if self._k_is_v else 2), dim=1)
        heads = torch.cat((self.q_norm(q), self.k_norm(k), self.v_norm(values[0] if values else k)), dim=1)
        heads = rotate(heads, self._heads + self._kv_heads, *cos_sin)
        q, k, v = heads.split_with_sizes([self._heads, self._kv_heads, self._kv_heads], dim=1)
        out = cache(self._source, AttnRows(q, k, v, 1.0))
        return self.o_proj(out.reshape(len(x), -1))  # type: ignore[no-any-return]


class Gemma4Layer(nn.Module):
    """x + norm(attention(norm(x))), then + norm(MLP(norm(.))), then + norm(projection of gelu(gate) * per-layer input),
    times a scalar. With experts, their normed output is added to the MLP's. [T, E] -> [T, E]."""

    def __init__(self, config: Gemma4Config, layer_id: int, build: Build, attention: nn.Module | None = None) -> None:
        super().__init__()
        size, per_layer = config.hidden_size, config.per_layer_size
        self.input_layernorm = make_norm(config, size, build)
        self.self_attn = attention or Gemma4Attention(config, layer_id, build)
        self.post_attention_layernorm = make_norm(config, size, build)
        self.pre_feedforward_layernorm = make_norm(config, size, build)
        self.mlp = GeluMLP(size, config.mlp_sizes[layer_id], False, build)
        self.post_feedforward_layernorm = make_norm(config, size, build)
        self.router: ScaledRouter | None = None
        if config.moe is not None:
            inner, num = config.moe.intermediate_size, config.moe.num_experts
            self.router = ScaledRouter(config, build)
            self.experts = Experts(lambda: GeluMLP(size, inner, False, build), num, size, build)
            self.post_feedforward_layernorm_1 = make_norm(config, size, build)
            self.pre_feedforward_layernorm_2 = make_norm(config, size, build)
            self.post_feedforward_layernorm_2 = make_norm(config, size, build)
        if per_layer:
            self.per_layer_input_gate = Linear(size, per_layer, build)
            self.per_layer_projection = Linear(per_layer, size, build)
            self.post_per_layer_input_norm = make_norm(config, size, build)
        self.layer_scalar = build.empty(1)
        self._on_cpu = supports(build.device, build.dtype)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache, per_layer_TP: Tensor | None = None
    ) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos_sin, cache))
        out = self.mlp(self.pre_feedforward_layernorm(x))
        if self.router is not None:
            routed = self.experts.weighted_sum(self.pre_feedforward_layernorm_2(x), *self.router.choose(x))
            out = self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(out)
        if per_layer_TP is not None:
            gated = gelu_gate(torch.cat((self.per_layer_input_gate(x), per_layer_TP), dim=-1), self._on_cpu)
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar


class ScaledRouter(nn.Module):
    """Softmax over all experts; the chosen ones' weights are renormalised, then multiplied by each expert's scale."""

    def __init__(self, config: Gemma4Config, build: Build) -> None:
        super().__init__()
        assert config.moe is not None
        self._top_k, self._root = config.moe.top_k, config.hidden_size**-0.5
        self.norm = UnitRMSNorm(config.hidden_size, config.rms_eps, build)
        self.scale = build.empty(config.hidden_size)
        self.proj = Linear(config.hidden_size, config.moe.num_experts, replace(build, quantization=None))
        self.per_expert_scale = build.empty(config.moe.num_experts)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `moe.Router.choose`."""
        scores = self.proj(self.norm(x) * self.scale * self._root).float().softmax(dim=-1)
        ids = scores.topk(self._top_k, dim=-1).indices.sort(dim=-1).values
        weights = scores.gather(1, ids)
        return ids, weights / row_sum(weights) * self.per_expert_scale[ids]

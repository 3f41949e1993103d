"""A decoder layer and its usual parts: SwiGLU MLP, grouped-query attention; the first layer of an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.cpu import elementwise
from baton.kernels.cpu.elementwise import silu_mul
from baton.kernels.cpu.scalar import supports
from baton.models.config import ModelConfig
from baton.models.layer_cache import Attend, AttnRows, LayerCache
from baton.models.layers.layernorm import RMSNorm, make_norm
from baton.models.layers.linear import Build, MergedLinear, WeightCut
from baton.models.layers.rotary import rotate
from baton.models.layers.row_linear import RowLinear


def sigmoid(x: Tensor) -> Tensor:
    """In float32. On a CPU, unlike PyTorch's, its bits do not depend on a number's position."""
    return elementwise.sigmoid(x) if x.device.type == "cpu" else x.sigmoid()


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)), [T, E] -> [T, E]."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, build: Build) -> None:
        super().__init__()
        share = build.ranks.share(intermediate, "inner numbers of an MLP")
        self.gate_up_proj = MergedLinear(hidden, {"gate_proj": share, "up_proj": share}, build, bias)
        self.down_proj = RowLinear(share, hidden, build, bias)
        self._on_cpu = supports(build.device, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_up_proj(x)))  # type: ignore[no-any-return]

    def partials(self, x: Tensor) -> list[Tensor]:
        return self.down_proj.partials(self.gated(self.gate_up_proj(x)))

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gates and ups side by side, [T, 2I] -> [T, I]."""
        if self._on_cpu:
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class Attention(nn.Module):
    """Grouped-query attention, with or without rotary embedding. `attend` does the softmax and the cache.

    `in_features` differs from the hidden size only in a drafter whose input is embedding and features side by side.
    """

    writes = True

    def __init__(self, config: ModelConfig, layer_id: int, build: Build, in_features: int | None = None) -> None:
        super().__init__()
        self._layer_id, self.head_dim = layer_id, config.head_dim
        heads = build.ranks.share(config.num_heads, "attention heads")
        kv_heads = build.ranks.kv_heads(config.num_kv_heads)
        self.num_heads, self.num_kv_heads = heads.length, kv_heads.length
        self._split = [heads.length, kv_heads.length, kv_heads.length]
        self.scale = config.attention_multiplier or config.head_dim**-0.5
        q_size, kv_size = heads.times(config.head_dim), kv_heads.times(config.head_dim)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(in_features or config.hidden_size, parts, build, config.qkv_bias)
        self.o_proj = RowLinear(q_size, config.hidden_size, build, config.o_bias)
        self.q_norm = make_norm(config, config.head_dim, build) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim, build) if config.qk_norm else None
        self.sinks = replace(build, dtype=torch.float32).empty(heads.length) if config.has_sinks else None
        self.cuts: dict[str, WeightCut] = {"sinks": (0, heads)}

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = heads.split_with_sizes(self._split, dim=1)
            heads = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)
        if cos_sin is not None:
            heads = rotate(heads, self.num_heads + self.num_kv_heads, *cos_sin)
        q, k, v = heads.split_with_sizes(self._split, dim=1)
        out = attend(self._layer_id, AttnRows(q, k, v, self.scale, self.sinks))
        return self.o_proj(out.reshape(x.shape[0], -1))  # type: ignore[no-any-return]

    def write(self, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None, cache: LayerCache) -> None:
        heads = self.qkv_proj.outputs_from(x, self.num_heads * self.head_dim)
        heads = heads.view(x.shape[0], 2 * self.num_kv_heads, self.head_dim)
        if self.k_norm is not None:
            k, v = heads.chunk(2, dim=1)
            heads = torch.cat((self.k_norm(k), v), dim=1)
        if cos_sin is not None:
            heads = rotate(heads, self.num_kv_heads, *cos_sin)
        cache.write(self._layer_id, *heads.chunk(2, dim=1))


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then + MLP(norm(.)). [T, E] -> [T, E]. `attention` and `mlp`
    replace the default ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        build: Build,
        input_norm: bool = True,
        attention: nn.Module | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size, build) if input_norm else None
        self.self_attn = attention or Attention(config, layer_id, build)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, build)
        self.mlp = mlp or MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x, normed = self.post_attention_layernorm.add_and_norm(x, self.self_attn(normed, cos_sin, attend))
        return x + self.mlp(normed)  # type: ignore[no-any-return]

    @property
    def writes(self) -> bool:
        return getattr(self.self_attn, "writes", False)

    def write(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> None:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        self.self_attn.write(normed, cos_sin, cache)  # type: ignore[operator]


class FusionLayer(nn.Module):
    """An EAGLE-3 head's first layer: from an embedding and a hidden state, [T, E] each, to the residual stream."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool, attention: nn.Module, build: Build) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps, build)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_eps, build)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps, build)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, build)

    def forward(self, embeds: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        joined = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        x = residual + self.self_attn(joined, cos_sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def write(self, embeds: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> None:
        joined = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        self.self_attn.write(joined, cos_sin, cache)  # type: ignore[operator]

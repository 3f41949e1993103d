"""The base of Qwen3-Next and Qwen3.5: gated delta nets, with gated attention in every few layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, get_int, rope_section
from baton.models.layer_cache import LayerCache, LayerSpec
from baton.models.layers.gated_attention import GatedAttention
from baton.models.layers.gated_delta import GatedDeltaNet, GatedDeltaSpec
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward
from baton.models.layers.specs import MoESpec
from baton.models.loading.tensor_names import split_experts, split_rows

_RECURRENT, _ATTENTION = "linear_attention", "full_attention"
# Layouts of positions in images; text has the same positions in all sections.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenHybridConfig(ModelConfig):
    """`is_recurrent[l]`: layer l is a gated delta net."""

    is_recurrent: tuple[bool, ...]
    delta: GatedDeltaSpec


class QwenHybrid(CausalLM):
    """A model whose tensors are stored as in Qwen3.5. MTP modules, stored under `mtp.`, are not loaded."""

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        hybrid = cast(QwenHybridConfig, config)
        return hybrid.delta.state_spec if hybrid.is_recurrent[layer_id] else super().kv_layer(config, layer_id)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return QwenHybridLayer(cast(QwenHybridConfig, config), layer_id, build)

    def mtp_config(self, num_modules: int) -> ModelConfig:
        config = cast(QwenHybridConfig, super().mtp_config(num_modules))
        return replace(config, is_recurrent=(False,) * num_modules)

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Split joined q, k and v, and stacked experts; rename the shared expert."""
        delta = cast(QwenHybridConfig, self.config).delta
        owner, _, kind = name.rpartition(".")
        place, _, layer = owner.rpartition(".")
        if place.endswith(".linear_attn") and layer in ("in_proj_qkv", "conv1d"):
            prefix = f"{place}.in_proj_" if layer == "in_proj_qkv" else f"{owner}."
            parts = dict(zip(("q", "k", "v"), delta.conv_sizes, strict=True))
            for part, values in split_rows(name, tensor, parts):
                yield f"{prefix}{part}.{kind}", values
        elif name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
            moe = self.config.moe
            yield from split_experts(name, tensor, *((moe.num_experts, moe.intermediate_size) if moe else (0, 0)))
        else:
            name = name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
            yield name.replace(".mlp.shared_expert_gate.", ".mlp.shared_gate."), tensor


class QwenHybridLayer(nn.Module):
    """x + mixer(norm(x)), then + MLP(norm(.)). [T, E] -> [T, E]."""

    def __init__(self, config: QwenHybridConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        size, recurrent = config.hidden_size, config.is_recurrent[layer_id]
        self.input_layernorm = make_norm(config, size, build)
        self.linear_attn = GatedDeltaNet(config.delta, size, config.rms_eps, layer_id, build) if recurrent else None
        self.self_attn = None if recurrent else GatedAttention(config, layer_id, build)
        self.post_attention_layernorm = make_norm(config, size, build)
        self.mlp = feed_forward(config, layer_id, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        normed = self.input_layernorm(x)
        if self.linear_attn is not None:
            mixed = self.linear_attn(normed, cache)
        else:
            assert self.self_attn is not None
            mixed = self.self_attn(normed, cos_sin, cache)
        x, normed = self.post_attention_layernorm.add_and_norm(x, mixed)
        return x + self.mlp(normed)  # type: ignore[no-any-return]

    @property
    def writes(self) -> bool:
        return self.self_attn is not None

    def write(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> None:
        """As `DecoderLayer.write`."""
        assert self.self_attn is not None
        self.self_attn.write(self.input_layernorm(x), cos_sin, cache)


def hybrid_fields(raw: RawConfig) -> dict[str, Any]:
    """`QwenHybridConfig` without experts, as keyword arguments. Raises `CheckpointError`."""
    section = {name: value for name, value in rope_section(raw).items() if name not in _OF_IMAGES}
    raw = {**raw, "rope_scaling": None, "rope_parameters": section}
    if not get_bool(raw, "attn_output_gate", True):
        raise CheckpointError("config.json: attn_output_gate false is not supported")
    if raw.get("mamba_ssm_dtype") not in (None, "float32"):
        raise CheckpointError(f"config.json: mamba_ssm_dtype is {raw['mamba_ssm_dtype']!r}, expected float32")
    fields = decoder_fields(raw, max_position_default=32768, head_dim_default=256, partial_rotary_default=0.25)
    bias = get_bool(raw, "attention_bias")
    delta = GatedDeltaSpec(
        key_heads=get_int(raw, "linear_num_key_heads", 16),
        key_dim=get_int(raw, "linear_key_head_dim", 128),
        value_heads=get_int(raw, "linear_num_value_heads", 32),
        value_dim=get_int(raw, "linear_value_head_dim", 128),
        taps=get_int(raw, "linear_conv_kernel_dim", 4, minimum=2),
    )
    kinds = _layer_kinds(raw, fields["num_layers"])
    return {
        **fields,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "norm_offset": 1.0,
        "is_recurrent": kinds,
        "delta": delta,
    }


def qwen_experts(raw: RawConfig, layers: tuple[bool, ...]) -> MoESpec:
    """The shared expert has its own gate."""
    return MoESpec(
        layers=layers,
        num_experts=get_int(raw, "num_experts"),
        top_k=get_int(raw, "num_experts_per_tok"),
        intermediate_size=get_int(raw, "moe_intermediate_size", 512),
        renormalise=get_bool(raw, "norm_topk_prob", True),
        shared_size=get_int(raw, "shared_expert_intermediate_size", 512),
        has_shared_gate=True,
    )


def _layer_kinds(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    kinds = raw.get("layer_types")
    if kinds is None:
        interval = get_int(raw, "full_attention_interval", 4)
        return tuple(bool((layer + 1) % interval) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in (_RECURRENT, _ATTENTION) for k in kinds):
        raise CheckpointError(
            f"config.json: layer_types must be {num_layers} of {_RECURRENT} or {_ATTENTION}, got {kinds!r}"
        )
    return tuple(kind == _RECURRENT for kind in kinds)

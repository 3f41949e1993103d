"""Kimi Linear (`model_type` kimi_linear): Kimi Delta Attention, with a layer of latent attention without positions
after every few; DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.architectures.deepseek_v32 import expert_kinds
from baton.models.architectures.mixtral import rename_expert
from baton.models.config import ModelConfig, RawConfig, get_int
from baton.models.families.deepseek import Deepseek, latent_fields, require_value, sigmoid_experts
from baton.models.layer_cache import LayerSpec
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.gated_delta import GatedDeltaSpec
from baton.models.layers.kimi_delta import KimiDeltaNet
from baton.models.layers.latent import LatentAttention
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward

# Fields of published configs, with DeepSeek's names.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}
_RECURRENT, _ATTENTION = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiConfig(ModelConfig):
    """`is_recurrent[l]`: layer l is a delta net."""

    is_recurrent: tuple[bool, ...]
    delta: GatedDeltaSpec


class KimiLinear(Deepseek):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> KimiConfig:
        raw = {**_DEFAULTS, **raw, **{new: raw[old] for old, new in _NAMES.items() if raw.get(old) is not None}}
        require_value(raw, "mla_use_nope", True)
        require_value(raw, "moe_router_activation_func", "sigmoid")
        # Positions are not rotated.
        ropes = dict.fromkeys(("rope_parameters", "rope_scaling", "partial_rotary_factor"))
        fields = latent_fields({**raw, **ropes}, max_position_default=1048576, interleaved=False)
        num_layers, linear = fields["num_layers"], raw.get("linear_attn_config") or {}
        if not isinstance(linear, Mapping):
            raise CheckpointError(f"config.json: linear_attn_config is {linear!r}, expected an object")
        return KimiConfig(
            **fields,
            moe=replace(sigmoid_experts(raw, num_layers), layers=expert_kinds(raw, num_layers)),
            is_recurrent=_recurrent_layers(raw, linear, num_layers),
            delta=_delta(raw, linear),
        )

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        kimi = cast(KimiConfig, config)
        return kimi.delta.state_spec if kimi.is_recurrent[layer_id] else super().kv_layer(config, layer_id)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        kimi = cast(KimiConfig, config)
        attention: nn.Module
        if kimi.is_recurrent[layer_id]:
            attention = KimiDeltaNet(kimi.delta, kimi.hidden_size, kimi.rms_eps, layer_id, build)
        else:
            attention = UnrotatedAttention(kimi, layer_id, build)
        return DecoderLayer(kimi, layer_id, build, attention=attention, mlp=feed_forward(kimi, layer_id, build))

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return ((rename_expert(name), tensor),)


class UnrotatedAttention(LatentAttention):
    """Latent attention without positions: the rope parts of queries and keys stay as they are."""

    def _rotated(self, ropes: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        return ropes


def _delta(raw: RawConfig, linear: Mapping[str, Any]) -> GatedDeltaSpec:
    """From `linear_attn_config`, or from the fields that transformers writes."""
    raw = {**raw, **{new: linear[old] for old, new in _OF_LINEAR.items() if old in linear}}
    heads, size = get_int(raw, "linear_num_heads", 32), get_int(raw, "linear_head_dim", 128)
    return GatedDeltaSpec(heads, size, heads, size, get_int(raw, "linear_conv_kernel_dim", 4, minimum=2))


_OF_LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _recurrent_layers(raw: RawConfig, linear: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Layers that are delta nets: by `layer_types`, or by the lists of `linear_attn_config`, which count from 1."""
    kinds, names = raw.get("layer_types"), ("kda_layers", "full_attn_layers")
    if kinds is None and all(name in linear for name in names):
        delta, full = (linear[name] for name in names)
        known = isinstance(delta, list) and isinstance(full, list)
        if not known or sorted([*delta, *full]) != list(range(1, num_layers + 1)):
            raise CheckpointError(
                f"config.json: linear_attn_config: kda_layers and full_attn_layers must name layers 1 to {num_layers}, "
                f"each once, got {delta!r} and {full!r}"
            )
        return tuple(layer + 1 in delta for layer in range(num_layers))
    if kinds is None:
        return tuple(layer == 0 or layer % 4 > 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in (_RECURRENT, _ATTENTION) for k in kinds):
        raise CheckpointError(
            f"config.json: layer_types must be {num_layers} of {_RECURRENT} or {_ATTENTION}, got {kinds!r}"
        )
    return tuple(kind == _RECURRENT for kind in kinds)

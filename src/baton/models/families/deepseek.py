"""The base of DeepSeek-V2 and V3: latent attention, and experts after the first dense layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, get_float, get_int
from baton.models.layer_cache import LatentLayerSpec, LayerSpec
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.latent import LatentAttention
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward
from baton.models.layers.specs import LatentSpec, MoESpec
from baton.models.loading.tensor_names import layer_index


class Deepseek(CausalLM):
    """A model with latent attention. MTP modules are not loaded."""

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        assert config.latent is not None
        return LatentLayerSpec(config.latent.latent_dim, config.latent.rope_dim)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        attention = LatentAttention(config, layer_id, build)
        return DecoderLayer(config, layer_id, build, attention=attention, mlp=feed_forward(config, layer_id, build))

    def stored_name(self, name: str) -> str | None:
        return None if is_mtp_layer(name, self.config.num_layers) else super().stored_name(name)


def is_mtp_layer(name: str, num_layers: int) -> bool:
    """Checkpoints store MTP modules as layers after the last."""
    index = layer_index(name)
    return index is not None and index >= num_layers


def latent_fields(raw: RawConfig, max_position_default: int, interleaved: bool) -> dict[str, Any]:
    """Keyword arguments of `ModelConfig`."""
    heads = get_int(raw, "num_attention_heads")
    if get_int(raw, "num_key_value_heads", heads) != heads:
        raise CheckpointError("config.json: num_key_value_heads differs from num_attention_heads")
    rope_dim = get_int(raw, "qk_rope_head_dim", 64)
    # A config's `head_dim` is the rotated part or the whole head; transformers derives it.
    fields = decoder_fields({**raw, "head_dim": rope_dim}, max_position_default)
    spec = LatentSpec(
        latent_dim=get_int(raw, "kv_lora_rank", 512),
        rope_dim=rope_dim,
        nope_dim=get_int(raw, "qk_nope_head_dim", 128),
        value_dim=get_int(raw, "v_head_dim", 128),
        # Null means none; if absent, the default.
        query_rank=get_int(raw, "q_lora_rank", 1536) if raw.get("q_lora_rank", 1536) is not None else None,
        is_interleaved=interleaved,
    )
    bias = get_bool(raw, "attention_bias")
    head_dim = spec.nope_dim + rope_dim
    return {**fields, "head_dim": head_dim, "latent": spec, "qkv_bias": bias, "o_bias": bias}


def sigmoid_experts(raw: RawConfig, num_layers: int) -> MoESpec:
    """DeepSeek-V3's experts (arXiv:2412.19437, 2.1.2)."""
    require_value(raw, "topk_method", "noaux_tc")
    require_value(raw, "scoring_func", "sigmoid")
    width = get_int(raw, "moe_intermediate_size")
    return MoESpec(
        layers=expert_layers(raw, num_layers),
        num_experts=get_int(raw, "n_routed_experts"),
        top_k=get_int(raw, "num_experts_per_tok"),
        intermediate_size=width,
        scores="sigmoid",
        renormalise=get_bool(raw, "norm_topk_prob", True),
        scale=get_float(raw, "routed_scaling_factor"),
        has_choice_bias=True,
        num_groups=get_int(raw, "n_group"),
        top_groups=get_int(raw, "topk_group"),
        group_score="two_best",
        shared_size=width * get_int(raw, "n_shared_experts", 1, minimum=0),
    )


def expert_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    first = get_int(raw, "first_k_dense_replace", 0, minimum=0)
    step = get_int(raw, "moe_layer_freq", 1)
    return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))


def require_value(raw: RawConfig, name: str, *supported: object) -> None:
    """Raises `CheckpointError` for an unsupported value. Absence and null pass."""
    value = raw.get(name)
    if value is not None and value not in supported:
        raise CheckpointError(f"config.json: {name} is {value!r}, expected {' or '.join(map(repr, supported))}")

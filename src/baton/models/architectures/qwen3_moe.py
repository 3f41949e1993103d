"""Qwen3 with experts (`model_type` qwen3_moe): Qwen3's attention, softmax over all experts, no shared expert."""

from __future__ import annotations

from torch import nn

from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, get_int
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward
from baton.models.layers.specs import MoESpec


class Qwen3Moe(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        bias = get_bool(raw, "attention_bias")
        fields = decoder_fields({"num_key_value_heads": 4, **raw}, max_position_default=32768)
        if get_bool(raw, "use_sliding_window"):
            fields["windows"] = (get_int(raw, "sliding_window", 4096),) * fields["num_layers"]
        moe = MoESpec(
            layers=moe_layers(raw, fields["num_layers"]),
            num_experts=get_int(raw, "num_experts" if "num_experts" in raw else "num_local_experts", 128),
            top_k=get_int(raw, "num_experts_per_tok", 8),
            intermediate_size=get_int(raw, "moe_intermediate_size", 768),
            renormalise=get_bool(raw, "norm_topk_prob"),
        )
        return ModelConfig(**fields, qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return DecoderLayer(config, layer_id, build, mlp=feed_forward(config, layer_id, build))


def moe_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    step, dense = get_int(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r}, expected a list of layer ids")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))

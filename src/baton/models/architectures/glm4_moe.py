"""GLM-4.5 and 4.6 (`model_type` glm4_moe): grouped-query attention, partly rotated heads, DeepSeek-V3's experts."""

from __future__ import annotations

from torch import nn

from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool
from baton.models.families.deepseek import is_mtp_layer, sigmoid_experts
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward

_DEFAULTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}


class Glm4Moe(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        raw = {**_DEFAULTS, **raw}
        fields = decoder_fields(raw, max_position_default=131072, partial_rotary_default=0.5)
        return ModelConfig(
            **fields,
            qkv_bias=get_bool(raw, "attention_bias"),
            qk_norm=get_bool(raw, "use_qk_norm"),
            moe=sigmoid_experts(raw, fields["num_layers"]),
        )

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return DecoderLayer(config, layer_id, build, mlp=feed_forward(config, layer_id, build))

    def stored_name(self, name: str) -> str | None:
        return None if is_mtp_layer(name, self.config.num_layers) else super().stored_name(name)

"""Dense Qwens. Qwen2 and 2.5 (`model_type` qwen2): biases on q, k and v, optional windows on the upper layers. Qwen3
(qwen3): RMSNorm on each query and key head, its own head size."""

from __future__ import annotations

from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, layer_windows


class Qwen2(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        fields = decoder_fields(raw, max_position_default=32768)
        fields["windows"] = layer_windows(raw, fields["num_layers"])
        return ModelConfig(**fields, qkv_bias=True)


class Qwen3(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        bias = get_bool(raw, "attention_bias")
        fields = decoder_fields(raw, max_position_default=32768, head_dim_default=128)
        fields["windows"] = layer_windows(raw, fields["num_layers"])
        return ModelConfig(**fields, qkv_bias=bias, o_bias=bias, qk_norm=True)

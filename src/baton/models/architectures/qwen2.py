"""Qwen2 and Qwen2.5 (`model_type` qwen2): biases on q, k and v; optional windows on the upper layers."""

from __future__ import annotations

from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, layer_windows


class Qwen2(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        fields = decoder_fields(raw, max_position_default=32768)
        fields["windows"] = layer_windows(raw, fields["num_layers"])
        return ModelConfig(**fields, qkv_bias=True)

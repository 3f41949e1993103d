"""Llama 1-3.x (`model_type` llama): full attention, optional biases.

The forward is in `models.base` and `layers.decoder_layer`.
"""

from __future__ import annotations

from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool


class Llama(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        bias = get_bool(raw, "attention_bias")
        fields = decoder_fields(raw, max_position_default=2048)
        return ModelConfig(**fields, qkv_bias=bias, o_bias=bias, mlp_bias=get_bool(raw, "mlp_bias"))

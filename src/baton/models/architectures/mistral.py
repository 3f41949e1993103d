"""Mistral (`model_type` mistral): one sliding window for all layers, or none."""

from __future__ import annotations

from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_int


class Mistral(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        if raw.get("layer_types") is not None:
            raise CheckpointError("config.json: layer_types is not supported for model_type 'mistral'")
        fields = decoder_fields({"num_key_value_heads": 8, **raw}, max_position_default=131072)
        # If absent, the default of 4096; null means full attention.
        has_window = raw.get("sliding_window", 4096) is not None
        window = get_int(raw, "sliding_window", 4096) if has_window else None
        fields["windows"] = (window,) * fields["num_layers"]
        return ModelConfig(**fields)

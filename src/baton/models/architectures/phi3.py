"""Phi-3 and Phi-4 (`model_type` phi3; arXiv:2404.14219): Llama with joined projections, and partly rotated heads in
some. Contexts beyond the original length (`longrope`) are refused."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_int
from baton.models.loading.tensor_names import split_rows


class Phi3(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        fields = decoder_fields({"rms_norm_eps": 1e-5, **raw}, max_position_default=4096, partial_rotary_default=1.0)
        if raw.get("sliding_window") is not None:
            fields["windows"] = (get_int(raw, "sliding_window"),) * fields["num_layers"]
        return ModelConfig(**fields)

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        config, (owner, _, kind) = self.config, name.rpartition(".")
        place, _, layer = owner.rpartition(".")
        kv_size = config.num_kv_heads * config.head_dim
        joined = {
            "qkv_proj": {"q_proj": config.num_heads * config.head_dim, "k_proj": kv_size, "v_proj": kv_size},
            "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
        }
        if layer not in joined:
            yield name, tensor
            return
        for part, values in split_rows(name, tensor, joined[layer]):
            yield f"{place}.{part}.{kind}", values

"""DeepSeek-V3 and R1 (`model_type` deepseek_v3): sigmoid scores, biased for the choice of experts only."""

from __future__ import annotations

from baton.models.config import ModelConfig, RawConfig, get_bool
from baton.models.families.deepseek import Deepseek, latent_fields, sigmoid_experts

_DEFAULTS = {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


class DeepseekV3(Deepseek):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        fields = latent_fields(raw, max_position_default=4096, interleaved=get_bool(raw, "rope_interleave", True))
        return ModelConfig(**fields, moe=sigmoid_experts({**_DEFAULTS, **raw}, fields["num_layers"]))

"""DeepSeek-V2 and V2-Lite (`model_type` deepseek_v2): softmax scores, experts of all groups or of the best ones."""

from __future__ import annotations

from baton.models.config import ModelConfig, RawConfig, get_bool, get_float, get_int
from baton.models.families.deepseek import Deepseek, expert_layers, latent_fields, require_value
from baton.models.layers.specs import MoESpec


class DeepseekV2(Deepseek):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        fields = latent_fields(raw, max_position_default=2048, interleaved=True)
        require_value(raw, "topk_method", "greedy", "group_limited_greedy")
        require_value(raw, "scoring_func", "softmax")
        # DeepSeek's own code then renormalises instead of scaling, transformers never does.
        require_value(raw, "norm_topk_prob", False)
        grouped = raw.get("topk_method") == "group_limited_greedy"
        width = get_int(raw, "moe_intermediate_size", 1407)
        moe = MoESpec(
            layers=expert_layers(raw, fields["num_layers"]),
            num_experts=get_int(raw, "n_routed_experts", 64),
            top_k=get_int(raw, "num_experts_per_tok"),
            intermediate_size=width,
            scale=get_float(raw, "routed_scaling_factor", 1.0),
            num_groups=get_int(raw, "n_group") if grouped else 1,
            top_groups=get_int(raw, "topk_group") if grouped else 1,
            shared_size=width * get_int(raw, "n_shared_experts", 2, minimum=0),
        )
        return ModelConfig(**fields, mlp_bias=get_bool(raw, "mlp_bias"), moe=moe)

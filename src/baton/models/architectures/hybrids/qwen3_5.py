"""Qwen3.5 to 3.8 (`model_type` qwen3_5_text, or qwen3_5_moe_text with experts in every layer). Checkpoints with a
vision tower are loaded as their text model.
"""

from __future__ import annotations

from baton.models.config import RawConfig
from baton.models.families.deepseek import require_value
from baton.models.families.qwen_hybrid import QwenHybrid, QwenHybridConfig, hybrid_fields, qwen_experts


class Qwen35(QwenHybrid):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> QwenHybridConfig:
        return QwenHybridConfig(**hybrid_fields({"num_key_value_heads": 4, **raw}))


class Qwen35Moe(QwenHybrid):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> QwenHybridConfig:
        require_value(raw, "norm_topk_prob", True)
        # `intermediate_size` is that of dense layers, which this model lacks.
        fields = hybrid_fields({"intermediate_size": 1, **_DEFAULTS, **raw})
        return QwenHybridConfig(**fields, moe=qwen_experts({**_DEFAULTS, **raw}, (True,) * fields["num_layers"]))


_DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 2}

"""Architectures by `model_type`, imported on first use."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from baton.errors import CheckpointError

if TYPE_CHECKING:
    from baton.models.base import CausalLM

MODELS = {
    "granitemoehybrid": "baton.models.architectures.hybrids.granitemoehybrid:GraniteMoeHybrid",
    "deepseek_v2": "baton.models.architectures.deepseek_v2:DeepseekV2",
    "deepseek_v3": "baton.models.architectures.deepseek_v3:DeepseekV3",
    "deepseek_v32": "baton.models.architectures.deepseek_v32:DeepseekV32",
    "deepseek_v4": "baton.models.architectures.deepseek_v4:DeepseekV4",
    "gemma3_text": "baton.models.architectures.gemma3:Gemma3",
    "gemma4_text": "baton.models.architectures.gemma4:Gemma4",
    "glm4_moe": "baton.models.architectures.glm4_moe:Glm4Moe",
    "glm_moe_dsa": "baton.models.architectures.deepseek_v32:GlmMoeDsa",
    "gpt_oss": "baton.models.architectures.gpt_oss:GptOss",
    "kimi_linear": "baton.models.architectures.hybrids.kimi_linear:KimiLinear",
    "llama": "baton.models.architectures.llama:Llama",
    "minimax_m2": "baton.models.architectures.minimax_m2:MiniMaxM2",
    "mistral": "baton.models.architectures.mistral:Mistral",
    "mixtral": "baton.models.architectures.mixtral:Mixtral",
    "nemotron_h": "baton.models.architectures.hybrids.nemotron_h:NemotronH",
    "phi3": "baton.models.architectures.phi3:Phi3",
    "qwen2": "baton.models.architectures.qwen:Qwen2",
    "qwen3": "baton.models.architectures.qwen:Qwen3",
    "qwen3_5_moe_text": "baton.models.architectures.hybrids.qwen3_5:Qwen35Moe",
    "qwen3_5_text": "baton.models.architectures.hybrids.qwen3_5:Qwen35",
    "qwen3_moe": "baton.models.architectures.qwen3_moe:Qwen3Moe",
    "qwen3_next": "baton.models.architectures.hybrids.qwen3_next:Qwen3Next",
}


def model_class(model_type: object) -> type[CausalLM]:
    """Raises `CheckpointError` naming an unknown `model_type`."""
    if not isinstance(model_type, str) or model_type not in MODELS:
        known = ", ".join(MODELS)
        raise CheckpointError(f"config.json: model_type is {model_type!r}, expected one of {known}")
    architecture: type[CausalLM] = pkgutil.resolve_name(MODELS[model_type])
    return architecture

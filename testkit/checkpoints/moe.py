"""Tiny random checkpoints of the models with experts and latents, in usual and in odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testkit.checkpoints.common import make_checkpoint

_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    # Derived by transformers; otherwise the usual tiny config would set them.
    "head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 256,
}
_ODD = {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3}
_INDEX = {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 16, "n_group": 1, "topk_group": 1}
_ARCHITECTURES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# By name: model_type, and changes to the usual tiny config.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "rope_scaling": _YARN, "n_shared_experts": 2}),
    "deepseek_v2-lite": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            **_LATENT,
            **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
            **{"first_k_dense_replace": 0, "attention_bias": True, "mlp_bias": False, "tie_word_embeddings": True},
        },
    ),
    "deepseek_v2-one-expert": (
        "deepseek_v2",
        {**_LATENT, **_ODD, "n_routed_experts": 1, "num_experts_per_tok": 1, "v_head_dim": 20, "kv_lora_rank": 26},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "rope_scaling": {**_YARN, "mscale": 1.0}},
    ),
    "deepseek_v3-odd": (
        "deepseek_v3",
        {
            **_LATENT,
            **_ODD,
            **{"kv_lora_rank": 21, "q_lora_rank": None, "qk_nope_head_dim": 9, "qk_rope_head_dim": 6, "v_head_dim": 13},
            **{"head_dim": 6},
            **{"n_group": 1, "topk_group": 1, "rope_interleave": False, "attention_bias": True, "n_routed_experts": 5},
            **{"norm_topk_prob": False, "tie_word_embeddings": True, "first_k_dense_replace": 0},
        },
    ),
    "deepseek_v32": ("deepseek_v32", {**_LATENT, **_INDEX, "rope_scaling": {**_YARN, "mscale": 1.0}}),
    "deepseek_v32-odd": (
        "deepseek_v32",
        {
            **_LATENT,
            **_INDEX,
            **_ODD,
            **{"kv_lora_rank": 21, "qk_nope_head_dim": 9, "qk_rope_head_dim": 6, "v_head_dim": 13, "head_dim": 6},
            **{"index_topk": 5, "index_n_heads": 5, "index_head_dim": 7, "tie_word_embeddings": True},
            **{"n_routed_experts": 5, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "attention_bias": True},
        },
    ),
    "glm_moe_dsa": ("glm_moe_dsa", {**_LATENT, **_INDEX, "index_topk_pattern": "FSF"}),
    "glm4_moe": (
        "glm4_moe",
        {**_EXPERTS, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "n_group": 1},
    ),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            **_EXPERTS,
            **{"first_k_dense_replace": 2, "n_group": 2, "topk_group": 1, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {
            **{"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_hidden_layers": 4},
            **{"decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "qwen3_moe-one-expert": (
        "qwen3_moe",
        {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "head_dim": 32},
    ),
}


def make_moe_checkpoint(path: str | Path, shape: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random target of a shape of `SHAPES` to the directory `path`. Returns it."""
    model_type, fields = SHAPES[shape]
    named = {"architectures": [_ARCHITECTURES[model_type]]}
    return make_checkpoint(path, model_type, seed, **{**named, **fields, **overrides})

"""Tiny random checkpoints of several architectures, written by transformers with the names of published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from testkit.checkpoints.common import state_model_values, write_tokenizer

TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "head_dim": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 16,
    # Far below all steps: only those of prompts are clamped.
    "time_step_min": 1e-9,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "num_nextn_predict_layers": 1,
}
_KIMI: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_V4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", _SPARSE, _HEAVY, _SPARSE],
    "compress_rates": {_SPARSE: 4, _HEAVY: 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "sliding_window": 9,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 8,
    "index_head_dim": 12,
    "index_topk": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    # Of an expert.
    "intermediate_size": 24,
}
_ODD = {"num_attention_heads": 3, "num_key_value_heads": 1}
# By name: transformers' class, and changes to the usual tiny config.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral, window": (
        "Mixtral",
        {
            **_ODD,
            **{"num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 19, "head_dim": 16},
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3, window": (
        "Phi3",
        {
            **{"hidden_size": 64, "sliding_window": 19, "partial_rotary_factor": 0.5, "num_key_value_heads": 4},
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 12, "rotary_dim": 6},
    ),
    "minimax_m2, odd": (
        "MiniMaxM2",
        {
            **_ODD,
            **{"num_local_experts": 1, "num_experts_per_tok": 1, "intermediate_size": 28, "head_dim": 22},
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": ("NemotronH", _NEMOTRON),
    "nemotron_h, odd": (
        "NemotronH",
        {
            **_NEMOTRON,
            **_ODD,
            "layers_block_type": ["linear_attention", "full_attention", "moe", "moe", "linear_attention", "mlp"],
            **{"n_groups": 3, "ssm_state_size": 7, "conv_kernel": 2, "mamba_head_dim": 9, "use_conv_bias": False},
            **{"moe_latent_size": 20, "mlp_bias": True, "use_bias": True, "n_routed_experts": 6, "n_group": 2},
            **{"norm_topk_prob": False, "routed_scaling_factor": 1.5, "num_experts_per_tok": 3},
        },
    ),
    "nemotron_h, one expert": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "linear_attention", "full_attention"],
            **{"n_groups": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_latent_size": 12},
            "tie_word_embeddings": True,
        },
    ),
    "kimi_linear": ("KimiLinear", _KIMI),
    "kimi_linear, odd": (
        "KimiLinear",
        {
            **_KIMI,
            **{"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 20, "qk_rope_head_dim": 6},
            **{"kv_lora_rank": 21, "qk_nope_head_dim": 9, "v_head_dim": 13, "linear_num_heads": 3},
            **{"linear_head_dim": 7, "linear_conv_kernel_dim": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "deepseek_v4": ("DeepseekV4", _V4),
    "deepseek_v4, odd": (
        "DeepseekV4",
        {
            **_V4,
            **{"num_attention_heads": 3, "o_groups": 3, "head_dim": 20, "partial_rotary_factor": 0.3, "hc_mult": 3},
            # Entries that do not divide evenly among their tokens.
            **{"compress_rates": {_SPARSE: 3, _HEAVY: 6}, "index_head_dim": 10, "index_topk": 8, "sliding_window": 5},
            **{"n_routed_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 1, "hc_sinkhorn_iters": 3},
            **{"layer_types": [_HEAVY, _HEAVY, _SPARSE, "sliding_attention"], "swiglu_limit": 0.5},
            **{"mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"], "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "deepseek_v4, long": (
        "DeepseekV4",
        {**_V4, "head_dim": 32, "compress_rates": None, "sliding_window": 128, "index_topk": 16, "index_head_dim": 20},
    ),
}


def make_written(
    path: str | Path, name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random model of `WRITTEN` to the directory `path`. Returns it. `overrides` replace fields of config.json.
    A Nemotron and a DeepSeek-V4 get an MTP module.

    States decay slowly enough that one after a hundred tokens still depends on the first.
    """
    import transformers

    directory, (cls, fields) = Path(path), WRITTEN[name]
    config = getattr(transformers, f"{cls}Config")(**{**TINY, **fields, **overrides})
    model: Any = getattr(transformers, f"{cls}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, tensor in sorted(model.state_dict().items()):
            if tensor.is_floating_point():
                tensor.copy_(state_model_values(tensor_name, tensor.shape, generator, _norm_mean))
            elif tensor_name.endswith("tid2eid"):
                tensor.copy_(torch.randint(config.n_routed_experts, tensor.shape, generator=generator))
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    if cls == "NemotronH" and config.num_nextn_predict_layers:
        _add_mtp(directory, config, generator, dtype)
    elif cls == "DeepseekV4":
        _add_v4_mtp(directory, config, generator, dtype)
    return directory


def _norm_mean(name: str) -> float | None:
    return 1.0 if "norm" in name or name.endswith(".D") else None


def _add_mtp(directory: Path, config: Any, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Add a module of two blocks with the shapes of the model's last attention and its last experts."""
    file = directory / "model.safetensors"
    tensors, size = load_file(file), config.hidden_size
    shapes = {
        **{f"mtp.layers.0.{part}.weight": torch.Size([size]) for part in ("enorm", "hnorm")},
        "mtp.layers.0.eh_proj.weight": torch.Size([size, 2 * size]),
        "mtp.layers.1.final_layernorm.weight": torch.Size([size]),
    }
    for block, kind in enumerate(("full_attention", "moe")):
        prefix = f"layers.{config.layers_block_type.index(kind)}."
        for name, tensor in tensors.items():
            if (found := name.partition(prefix))[1] and not found[0].startswith("mtp"):
                shapes[f"mtp.layers.{block}.{found[2]}"] = tensor.shape
    tensors |= {
        name: state_model_values(name, shape, generator, _norm_mean).to(dtype) for name, shape in sorted(shapes.items())
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _add_v4_mtp(directory: Path, config: Any, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Add a module with the shapes of a layer with a window alone, and routed experts."""
    file = directory / "model.safetensors"
    tensors, size = load_file(file), config.hidden_size
    own = f"layers.{config.layer_types.index('sliding_attention')}."
    shapes = {f"mtp.0.{part}.weight": torch.Size([size]) for part in ("enorm", "hnorm", "norm")}
    shapes |= {f"mtp.0.{part}.weight": torch.Size([size, size]) for part in ("e_proj", "h_proj")}
    shapes["mtp.0.ffn.gate.bias"] = torch.Size([config.n_routed_experts])
    for name, tensor in tensors.items():
        _, found, rest = name.partition(own)
        if found and not rest.endswith("tid2eid"):
            # The published name of a norm that transformers writes by another.
            shapes[f"mtp.0.{rest.replace('attn.norm.', 'attn.kv_norm.')}"] = tensor.shape
        elif ".hc_head.hc_" in name:
            shapes[f"mtp.0.hc_head_{name.rpartition('.hc_')[2]}"] = tensor.shape
    tensors |= {
        name: state_model_values(name, shape, generator, _norm_mean).to(dtype) for name, shape in sorted(shapes.items())
    }
    save_file(tensors, file, metadata={"format": "pt"})

"""Tiny random Granite hybrids, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from testkit.checkpoints.common import write_tokenizer

_TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 40,
    "shared_intermediate_size": 80,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_n_groups": 1,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "num_local_experts": 0,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def make_granite(path: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a random hybrid to the directory `path`. Returns it. `overrides` replace fields of config.json.

    Its layers decay slowly enough that a state after a hundred tokens still depends on the first.
    """
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    directory = Path(path)
    config = GraniteMoeHybridConfig(**{**_TINY, **overrides})
    model: Any = GraniteMoeHybridForCausalLM(config)  # its `to` has wrong types
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name or name.endswith(".D"):
                weight.copy_(1.0 + 0.1 * noise)
            elif name.endswith("A_log"):
                weight.copy_(noise - 2.0)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise - (2.0 if name.endswith("dt_bias") else 0.0))
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    return directory

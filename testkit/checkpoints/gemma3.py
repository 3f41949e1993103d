"""Tiny random checkpoints of Gemma 3, in usual and in odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from testkit.checkpoints.common import make_checkpoint

_TINY: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 6,
    "sliding_window": 24,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 20,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
    "eos_token_id": [257, 106],
}
# By name: changes to the tiny config.
GEMMA3_SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {},
    # The window is smaller than a page, and heads are not a divisor of the hidden size's half.
    "gemma3-odd": {
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 22,
        "intermediate_size": 70,
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": False,
    },
    # As transformers 5 writes it; a window of exactly two pages.
    "gemma3-new": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 32,
        "sliding_window_pattern": None,
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        "attention_bias": True,
    },
}


def make_gemma3(path: str | Path, shape: str = "gemma3", seed: int = 0, **overrides: Any) -> Path:
    """Write a random Gemma 3 of one of the shapes to the directory `path`. Returns it."""
    fields = {**_TINY, **GEMMA3_SHAPES[shape], **overrides}
    directory = make_checkpoint(path, "gemma3_text", seed, **{k: v for k, v in fields.items() if v is not None})
    file = directory / "model.safetensors"
    # Norms multiply by 1 + weight.
    weights = {name: value - 1.0 if "norm" in name else value for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return directory

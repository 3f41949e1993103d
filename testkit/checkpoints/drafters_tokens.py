"""Drafters that read tokens only, as `speculative_config`: prompt lookup, and small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testkit.checkpoints.common import make_checkpoint

WINDOW = 11


def ngram(num: int = 3) -> dict[str, Any]:
    """Prompt lookup of one to three tokens: random models repeat little."""
    return {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "num_speculative_tokens": num,
    }


def draft_model(path: Path, model_type: str = "llama", num: int = 3, **overrides: Any) -> dict[str, Any]:
    """A random model of one layer with its own shape; `overrides` as for `make_checkpoint`."""
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = make_checkpoint(path, model_type, seed=7, **{**small, **overrides})
    return {"method": "draft_model", "model": str(made), "num_speculative_tokens": num}


def windowed_draft_model(path: Path, num: int = 3) -> dict[str, Any]:
    """One windowed and one full layer: two groups."""
    types = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    return draft_model(path, "qwen3", num, num_hidden_layers=2, sliding_window=WINDOW, **types)

"""Tiny random checkpoints of Gemma 4 and its assistant, made by transformers, in usual and in odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from baton.models.loading.config_json import read_config
from testkit.checkpoints.common import NUM_BYTES, write_tokenizer

WINDOW = 9
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPES: dict[str, Any] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_TINY: dict[str, Any] = {
    "vocab_size": 260,
    "vocab_size_per_layer_input": 260,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "final_logit_softcapping": 8.0,
    "rope_parameters": _ROPES,
    "bos_token_id": NUM_BYTES,
    "eos_token_id": NUM_BYTES + 1,
    "pad_token_id": 0,
}
# By name: changes to the tiny config.
GEMMA4_SHAPES: dict[str, dict[str, Any]] = {
    "gemma4": {},
    # Values are keys in full layers, which have one head; nothing is shared, and there are no per-layer inputs.
    "gemma4-k_is_v": {
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": None,
    },
    "gemma4-experts": {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    # Three heads of 22 and 10 share one, over a hidden size of 60; a window of one page of 5; most layers share.
    "gemma4-odd": {
        "hidden_size": 60,
        "intermediate_size": 34,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 22,
        "global_head_dim": 10,
        "num_hidden_layers": 6,
        "layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING, _FULL, _FULL],
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 18,
        "use_double_wide_mlp": False,
        "sliding_window": 5,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}


def _randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted([*model.named_parameters(), *model.named_buffers()]):
            if name.endswith(("inv_freq", "embed_scale", "token_ordering")):
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2 and not name.endswith("bias"):
                weight.copy_(1.0 + 0.1 * noise)  # norms and scales
            elif "embed_tokens" in name or "lm_head" in name or name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)


def make_gemma4(
    path: str | Path, shape: str = "gemma4", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random Gemma 4 of one of the shapes to the directory `path`. Returns it."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    directory = Path(path)
    config = Gemma4TextConfig(**{**_TINY, **GEMMA4_SHAPES[shape], **overrides})
    model: Any = Gemma4ForCausalLM(config)  # its `to` has wrong types
    _randomise(model, seed)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    return directory


@contextmanager
def assistants_work() -> Iterator[None]:
    """transformers 5.23 refuses a config whose layers all share keys, which its own assistant's is, and gives an
    assistant no keys of a target whose layers share none."""
    import transformers

    config_class: Any = transformers.Gemma4TextConfig
    original = config_class.kv_sharing_modes.fget

    def modes(config: Any) -> Any:
        layers, types = config.num_hidden_layers, config.layer_types
        if config.num_kv_shared_layers == layers:
            return ["reuse"] * layers
        if config.num_kv_shared_layers == 0:
            return [None if kind in types[layer + 1 :] else "store" for layer, kind in enumerate(types)]
        return original(config)

    with mock.patch.object(config_class, "kv_sharing_modes", property(modes)):
        yield


def assistant_model(target_path: str | Path, seed: int = 0, num_centroids: int = 0, **overrides: Any) -> Any:
    """A random assistant of transformers for the target in `target_path`, with one layer of each kind."""
    import transformers as typed

    transformers: Any = typed

    target = read_config(target_path)
    full: dict[str, Any] = next(iter(target["per_layer_config"].values()), {})
    fields = {
        name: target[name]
        for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
    }
    fields |= {
        "rope_parameters": target["rope_parameters"],
        "layer_types": [_SLIDING, _FULL],
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "global_head_dim": full.get("head_dim", target["head_dim"]),
        "num_global_key_value_heads": full.get("num_key_value_heads"),
        "attention_k_eq_v": True,  # else the number of global heads is not read
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": target["max_position_embeddings"],
    }
    clusters = {"use_ordered_embeddings": num_centroids > 0, "num_centroids": num_centroids or 4}
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**{**fields, **overrides}),
        backbone_hidden_size=target["hidden_size"],
        centroid_intermediate_top_k=2,
        **clusters,
    )
    with assistants_work():
        model = transformers.Gemma4AssistantForCausalLM(config).eval()
    _randomise(model, seed)
    if num_centroids:
        order = torch.randperm(config.text_config.vocab_size, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(order)
    return model


def make_assistant(
    path: Path, target_path: Path, seed: int = 0, num: int = 3, num_centroids: int = 0, **overrides: Any
) -> dict[str, Any]:
    """As `assistant_model`, in the directory `path`, as `speculative_config`."""
    assistant_model(target_path, seed, num_centroids, **overrides).save_pretrained(path)
    return {"method": "assistant", "model": str(path), "num_speculative_tokens": num}

"""Random drafters with DeepSeek layers: a target with an MTP module, and an EAGLE-3 head of latents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from baton.drafters.dflash import DFlash
from baton.drafters.dspark import DSpark
from baton.drafters.eagle3 import Eagle3
from baton.drafters.mtp import Mtp
from baton.models.loading.config_json import read_config
from baton.models.loading.loader import load_model
from baton.models.registry import model_class
from testkit.checkpoints.common import _random_weights
from testkit.checkpoints.moe import make_moe_checkpoint

_LATENT_HEAD = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def make_mtp_checkpoint(path: Path, shape: str, seed: int = 0, num: int = 1, **overrides: Any) -> Path:
    """A random target of a shape of `moe.SHAPES` (deepseek_v3 or glm4_moe) with `num` MTP modules, with the
    tensor names of published checkpoints. Returns `path`.
    """
    make_moe_checkpoint(path, shape, seed, num_nextn_predict_layers=num, **overrides)
    target = load_model(path)
    weights = load_file(path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    for module, own in enumerate(Mtp(target, target.build, num).layers):
        prefix = f"model.layers.{target.config.num_layers + module}."
        for name, tensor in _random_weights(own, seed + 1 + module).items():
            name = name.removeprefix("layer.")
            weights[prefix + ("shared_head." + name if name.startswith("norm.") else name)] = tensor
        # Published checkpoints contain copies of the tensors that a module shares with its target.
        weights[prefix + "embed_tokens.weight"] = embedding.clone()
        weights[prefix + "shared_head.head.weight"] = weights.get("lm_head.weight", embedding).clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def mtp(num: int = 3) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": num}


def latent_head(path: Path, target_path: Path, seed: int = 0, num: int = 3, **overrides: Any) -> dict[str, Any]:
    """A random EAGLE-3 head whose layer attends over latents, for any target, as `speculative_config`."""
    target, known = load_model(target_path), read_config(target_path)
    layers = len(target.kv_layers)
    raw = {
        **_LATENT_HEAD,
        "hidden_size": known["hidden_size"],
        "vocab_size": known["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": sorted({0, layers // 2, layers}),
        **overrides,
    }
    config = model_class("deepseek_v3").parse_config(raw)
    head = Eagle3(config, raw, target, {"lm_head.weight"}, target.build)
    weights = {name.replace("layers.0.", "midlayer."): w for name, w in _random_weights(head, seed + 1).items()}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return {"method": "eagle3", "model": str(path), "num_speculative_tokens": num}


def block_drafter(path: Path, target_path: Path, method: str, num: int = 3, **overrides: Any) -> dict[str, Any]:
    """A random drafter of blocks (dflash or dspark) with two layers, for any target, as `speculative_config`."""
    target, known = load_model(target_path), read_config(target_path)
    layers = len(target.kv_layers)
    raw = {
        "architectures": [f"{method}DraftModel"],
        "model_type": "qwen3",
        "hidden_size": known["hidden_size"],
        "vocab_size": known["vocab_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
        "block_size": num + 1,
        "dflash_config": {"mask_token_id": 258, "target_layer_ids": sorted({0, layers - 1})},
        "markov_rank": 6,
        **overrides,
    }
    config = model_class("qwen3").parse_config(raw)
    names = {"embed_tokens.weight", "lm_head.weight"} if raw["hidden_size"] != known["hidden_size"] else set()
    drafter = {"dflash": DFlash, "dspark": DSpark}[method](config, raw, target, names, target.build)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    save_file(_random_weights(drafter, 3), path / "model.safetensors", metadata={"format": "pt"})
    return {"method": method, "model": str(path), "num_speculative_tokens": num}

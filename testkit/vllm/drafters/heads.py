"""Random DFlash heads, and Gemma 4 with its assistant."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testkit.vllm.checkpoints import COMMON, LOUD, save_random
from testkit.vllm.drafters import DRAFTER, write
from testkit.vllm.servers import ROOT

DFLASH = {"method": "dflash", "model": str(ROOT / "models" / "baton-demo-dflash"), "num_speculative_tokens": 3}
_SHARED_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def qwen3_moe_with_dflash(folder: Path) -> None:
    """Experts, and a random DFlash head."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    heads = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}
    save_random(Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **experts, **heads, tie_word_embeddings=False)), folder)
    dflash(folder / DRAFTER, folder)


def dflash(folder: Path, target: Path, **more: Any) -> None:
    """A DFlash head of two layers of random weights. It uses its target's embedding and head. `more`: of its config."""
    read = json.loads((target / "config.json").read_text())
    names = (*_SHARED_SIZES, "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    config = {name: read[name] for name in names}
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 4}
    config |= {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}, "dtype": "float32", **more}
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    layer = _layer(hidden, inner, queries) | {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
    norms = {f"self_attn.{name}_norm": head for name in "qk"}
    norms |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
    shapes: dict[str, Sequence[int]] = {"fc": (hidden, 2 * hidden)}
    shapes |= {f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    sizes = {"norm": hidden, "hidden_norm": hidden}
    sizes |= {f"layers.{number}.{name}": size for number in range(2) for name, size in norms.items()}
    write(folder, config, _random(shapes, sizes))


def gemma4(folder: Path) -> None:
    """Gemma 4 with windows in every second layer, and its assistant of one layer of each kind."""
    from transformers import Gemma4AssistantConfig, Gemma4ForCausalLM, Gemma4TextConfig

    sizes = {"num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32, "sliding_window": 64}
    plain = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    kinds = ["sliding_attention", "full_attention"]
    target = Gemma4TextConfig(
        **COMMON, **sizes, **plain, num_hidden_layers=4, layer_types=kinds * 2, tie_word_embeddings=False
    )
    target.architectures = ["Gemma4ForCausalLM"]
    save_random(Gemma4ForCausalLM(target), folder)
    own = Gemma4TextConfig(**COMMON, **sizes, **plain, num_hidden_layers=2, layer_types=kinds)
    config = Gemma4AssistantConfig(text_config=own.to_dict(), backbone_hidden_size=COMMON["hidden_size"])
    config.architectures = ["Gemma4AssistantForCausalLM"]
    hidden, inner, head = COMMON["hidden_size"], COMMON["intermediate_size"], sizes["head_dim"]
    layer = _layer(hidden, inner, COMMON["num_attention_heads"] * head)
    norms = {f"{place}_layernorm": hidden for place in ("input", "post_attention")}
    norms |= {f"{place}_feedforward_layernorm": hidden for place in ("pre", "post")} | {"self_attn.q_norm": head}
    shapes: dict[str, Sequence[int]] = {"pre_projection": (hidden, 2 * hidden), "post_projection": (hidden, hidden)}
    shapes |= {"model.embed_tokens": (COMMON["vocab_size"], hidden)}
    shapes |= {f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    lengths = {"model.norm": hidden}
    lengths |= {f"model.layers.{number}.{name}": size for number in range(2) for name, size in norms.items()}
    weights = _random(shapes, lengths)
    weights["model.embed_tokens.weight"][LOUD] *= 30  # its head: it embeds tokens as the target does
    weights |= {f"model.layers.{number}.layer_scalar": torch.ones(1) for number in range(2)}
    write(folder / DRAFTER, config.to_dict(), weights)


def _layer(hidden: int, inner: int, queries: int) -> dict[str, Sequence[int]]:
    layer: dict[str, Sequence[int]] = {"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}
    return layer | {"mlp.down_proj": (hidden, inner)} | {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}


def _random(shapes: Mapping[str, Sequence[int]], norms: Mapping[str, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.08 for name, shape in shapes.items()}
    return weights | {f"{name}.weight": torch.ones(size) for name, size in norms.items()}

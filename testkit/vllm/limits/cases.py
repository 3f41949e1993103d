"""Configurations of vLLM with drafters: arguments of an engine, with checkpoints made in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from testkit.vllm.checkpoints import COMMON, MLA, deepseek, glm4_moe, mamba2, shallow
from testkit.vllm.servers import EAGLE3, MODEL, ROOT

Arguments = dict[str, Any]
# Stages on CPUs need something that eager execution omits; the graph is traced, but executed eagerly.
STAGES: Arguments = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}
TENSOR: Arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SHARED_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def spec(method: str, **more: Any) -> Arguments:
    """vLLM's speculative configuration."""
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **more}}


def with_module(folder: Path) -> Arguments:
    """Attention with heads, experts, one MTP module."""
    glm4_moe(folder / "model")
    return {"model": str(folder / "model"), **spec("mtp")}


def with_draft_model(folder: Path, num_layers: int = 1, copies: int = 1) -> Arguments:
    """The demo model's first layers draft for it."""
    shallow(folder / "draft", num_layers, copies)
    return spec("draft_model", model=str(folder / "draft"))


def states_with_draft_model(folder: Path, mamba_layers: int = 3, draft_layers: int = 1) -> Arguments:
    """Mamba-2 with experts, and by default with more layers of it than of attention."""
    mamba2(folder / "model", 4, (*["mamba"] * mamba_layers, "attention") * 2)
    return {"model": str(folder / "model"), "enable_prefix_caching": False, **with_draft_model(folder, draft_layers)}


def with_index_keys(folder: Path) -> Arguments:
    """DeepSeek V3.2's configuration over random weights."""
    deepseek(folder / "model")
    path = folder / "model" / "config.json"
    indexer = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128, "q_lora_rank": 64}
    kind = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | indexer | kind))
    return {"model": str(folder / "model"), "load_format": "dummy", **spec("mtp", attention_backend=MLA)}


def with_dflash(folder: Path) -> Arguments:
    """A DFlash drafter of two layers of random weights for the demo model."""
    target = json.loads((MODEL / "config.json").read_text())
    names = (*SHARED_SIZES, "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    config = {name: target[name] for name in names}
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 4}
    config |= {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}, "dtype": "float32"}
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(config))
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.down_proj": (hidden, inner),
    }
    layer |= {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
    layer |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    norms = {f"self_attn.{name}_norm": head for name in "qk"}
    norms |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
    shapes: dict[str, Sequence[int]] = {"fc": (hidden, 2 * hidden)}
    shapes |= {f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    sizes = {"norm": hidden, "hidden_norm": hidden}
    sizes |= {f"layers.{number}.{name}": size for number in range(2) for name, size in norms.items()}
    weights = {f"{name}.weight": torch.randn(*shape) * 0.05 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(size) for name, size in sizes.items()}
    save_file(weights, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    return spec("dflash", model=str(folder / "draft"))


def with_gemma_assistant(folder: Path) -> Arguments:
    """Gemma 4 and its assistant, of random weights."""
    from transformers import Gemma4AssistantConfig, Gemma4TextConfig

    sizes = {"num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32, "sliding_window": 64}
    plain = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    layers = ["sliding_attention", "full_attention"]
    target = Gemma4TextConfig(**COMMON, **sizes, **plain, num_hidden_layers=4, layer_types=layers * 2)
    own = Gemma4TextConfig(**COMMON, **sizes, **plain, num_hidden_layers=2, layer_types=layers)
    target.architectures = ["Gemma4ForCausalLM"]
    target.save_pretrained(folder / "model")
    assistant = Gemma4AssistantConfig(text_config=own.to_dict(), backbone_hidden_size=COMMON["hidden_size"])
    assistant.architectures = ["Gemma4AssistantForCausalLM"]
    assistant.save_pretrained(folder / "assistant")
    model = {"model": str(folder / "model"), "load_format": "dummy", "tokenizer": str(MODEL)}
    return {**model, **spec("mtp", model=str(folder / "assistant"))}


def fixed(arguments: Arguments, folder: Path) -> Arguments:
    """Needs no checkpoint of its own."""
    return dict(arguments)


def staged(make: Callable[[Path], Arguments], folder: Path) -> Arguments:
    """Over two pipeline stages."""
    return make(folder) | STAGES


EAGLE = EAGLE3 | {"method": "eagle", "model": str(ROOT / "models" / "baton-demo-eagle")}
# In one server, and over stages.
DRAFTERS: dict[str, Callable[[Path], Arguments]] = {
    "n-grams": partial(fixed, spec("ngram", prompt_lookup_min=1, prompt_lookup_max=3)),
    "suffix decoding": partial(fixed, spec("suffix")),
    "EAGLE": partial(fixed, {"speculative_config": EAGLE}),
    "EAGLE-3": partial(fixed, {"speculative_config": EAGLE3}),
    "MTP": with_module,
    "a draft model": with_draft_model,
    "DFlash": with_dflash,
}
CASES: dict[str, Callable[[Path], Arguments]] = {
    "Mamba-2 with a draft model": states_with_draft_model,
    "as many layers of Mamba-2 as of attention, with a draft model": partial(
        states_with_draft_model, mamba_layers=1, draft_layers=3
    ),
    "Mamba-2 with a draft model, two tensor ranks": lambda folder: states_with_draft_model(folder) | TENSOR,
    **{f"stages with {name}": partial(staged, make) for name, make in DRAFTERS.items()},
    **{name: DRAFTERS[name] for name in ("suffix decoding", "DFlash")},
    "MLA with index keys (DSA), MTP": with_index_keys,
    "Gemma 4 with its assistant": with_gemma_assistant,
    "a draft model with other heads": partial(with_draft_model, copies=2),
}

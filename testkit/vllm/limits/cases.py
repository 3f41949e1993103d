"""Configurations of vLLM with drafters: arguments of an engine, with checkpoints made in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from testkit.vllm.checkpoints import MLA, deepseek, glm4_moe, mamba2, shallow
from testkit.vllm.drafters import DRAFTER
from testkit.vllm.drafters.heads import dflash, gemma4
from testkit.vllm.drafters.reshaped import with_larger_draft_model, with_smaller_draft_model
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


def with_dflash(folder: Path, **more: Any) -> Arguments:
    """A DFlash drafter of random weights for the demo model. `more`: of its configuration."""
    dflash(folder / "draft", MODEL, **more)
    return spec("dflash", model=str(folder / "draft"))


def with_dspark(folder: Path) -> Arguments:
    """The same layers, named as a DSpark drafter's."""
    dflash(folder / "draft", MODEL, architectures=["Qwen3DSparkModel"], dspark_target_layer_ids=[0, 2], mask_token_id=3)
    return spec("dspark", model=str(folder / "draft"))


def with_gemma_assistant(folder: Path) -> Arguments:
    """Gemma 4 and its assistant, of random weights."""
    gemma4(folder / "model")
    return {"model": str(folder / "model"), **spec("mtp", model=str(folder / "model" / DRAFTER))}


def with_reshaped(make: Callable[[Path], None], folder: Path) -> Arguments:
    """The demo model with a draft model of another shape."""
    make(folder / "model")
    return spec("draft_model", model=str(folder / "model" / DRAFTER))


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
    "a draft model with larger heads and more layers": partial(with_reshaped, with_larger_draft_model),
    "a draft model with one KV head": partial(with_reshaped, with_smaller_draft_model),
    "DFlash with windows in one of two layers": partial(
        with_dflash, layer_types=["sliding_attention", "full_attention"], sliding_window=64
    ),
    "DSpark": with_dspark,
}

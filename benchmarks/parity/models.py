"""The targets and drafters of the matrix. A new one is one line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from baton.engine.request import Request
from baton.engine.speculation.adaptive import AdaptiveDrafts
from baton.engine.speculation.draft_choice import IntArray
from testkit.checkpoints import kinds
from testkit.checkpoints.common import make_checkpoint, make_drafter
from testkit.checkpoints.drafters_layers import block_drafter, latent_head, make_mtp_checkpoint, mtp
from testkit.checkpoints.drafters_tokens import ngram, windowed_draft_model
from testkit.checkpoints.gemma3 import make_gemma3
from testkit.checkpoints.gemma4 import make_assistant, make_gemma4
from testkit.checkpoints.gpt_oss import make_gpt_oss
from testkit.checkpoints.granite import make_granite
from testkit.checkpoints.moe import make_moe_checkpoint
from testkit.checkpoints.qwen_hybrid import make_qwen_hybrid
from testkit.checkpoints.written import make_written
from testkit.engines import Stepped

NUM_DRAFTS = 3
THREE_MODULES = "deepseek_v3, three modules"
WITH_ONE_MODULE = (
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe",
    "glm_moe_dsa",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
WINDOW = 9
# Small enough that thousands of requests take minutes. All contexts are far below the maximum.
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}

# Random layers hardly attend to other tokens. Scaling the outputs of attention and scans makes a wrong entry visible.
_LOUDER = {"o_proj.weight": 6.0, "out_proj.weight": 6.0, "wo_b.weight": 6.0}

MakeTarget = Callable[[Path, int], Path]
# From its folder, the target's, and a seed to `--speculative-config`.
MakeDrafter = Callable[[Path, Path, int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """`needs` returns why a drafter does not fit a target, by the target's name, or None if it fits. `settings`: of
    engines that use it, each of which is given to `prepare` before its first request.
    """

    make: MakeDrafter | None
    needs: Callable[[str], str | None] = lambda target: "as for deepseek_v3" if target == THREE_MODULES else None
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Stepped], None] = lambda engine: None


class ByLength(AdaptiveDrafts):
    """Another k for each request and step, as an engine chooses it, but from the number of tokens alone: engines that
    measure choose unlike each other. Without drafts for some steps, in which a drafter's rows may wait.
    """

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> IntArray:
        lengths = [len(request.token_ids) for request in requests]
        counts = [7 * n // 3 % (NUM_DRAFTS + 1) if n // 5 % 2 else 0 for n in lengths]
        return np.minimum(counts, np.maximum(most, 0))


def chosen_by_length(engine: Stepped) -> None:
    assert engine.core.steps.adaptive is not None
    engine.core.steps.adaptive = ByLength(NUM_DRAFTS)


def auto(entry: DrafterEntry) -> DrafterEntry:
    """A drafter with `num_speculative_tokens` "auto"."""
    make = entry.make
    assert make is not None

    def with_auto(path: Path, target: Path, seed: int) -> dict[str, Any]:
        return {**make(path, target, seed), "num_speculative_tokens": "auto"}

    return dataclasses.replace(entry, make=with_auto, prepare=chosen_by_length)


def louder(checkpoint: Path) -> Path:
    """The same checkpoint, with scaled outputs of attention and scans."""
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        for end, factor in _LOUDER.items():
            if name.endswith(end):
                tensor *= factor
    save_file(weights, file, metadata={"format": "pt"})
    return checkpoint


def tiny(model_type: str, **overrides: Any) -> MakeTarget:
    return lambda path, seed: louder(make_checkpoint(path, model_type, seed, **{**TINY, **overrides}))


def tiny_moe(shape: str, **overrides: Any) -> MakeTarget:
    """A random target with experts, of a shape of the tests."""
    return lambda path, seed: louder(make_moe_checkpoint(path, shape, seed, **{**TINY, **overrides}))


def with_modules(shape: str, num: int = 1) -> MakeTarget:
    """As `tiny_moe`, with MTP modules."""
    return lambda path, seed: louder(make_mtp_checkpoint(path, shape, seed, num, **TINY))


def written(name: str, **overrides: Any) -> MakeTarget:
    """A random target that transformers writes."""
    return lambda path, seed: louder(make_written(path, name, seed, **overrides))


def head(method: str, **overrides: Any) -> DrafterEntry:
    def make(path: Path, target: Path, seed: int) -> dict[str, Any]:
        return {"method": method, "model": str(louder(make_drafter(path, method, target, seed, **overrides)))}

    return DrafterEntry(make)


def whole(make: MakeTarget, **settings: Any) -> DrafterEntry:
    return DrafterEntry(
        lambda path, target, seed: {"method": "draft_model", "model": str(make(path, seed))}, settings=settings
    )


def every_kind(path: Path, seed: int) -> Path:
    """A target with latent, window and state layers, which only the tests know."""
    table, name, place = kinds.REGISTERED
    table[name] = place
    return louder(make_checkpoint(path, name, seed, **{**TINY, "num_hidden_layers": 6}))


_IN_TURN = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
_EVERY_THIRD_FULL = {"sliding_window": WINDOW, "sliding_window_pattern": 3}

TARGETS: Mapping[str, MakeTarget] = {
    "llama": tiny("llama"),
    "mistral, window": tiny("mistral", sliding_window=WINDOW),
    "qwen2": tiny("qwen2"),
    "qwen3": tiny("qwen3"),
    "qwen3, full and window": tiny("qwen3", **_IN_TURN),
    "qwen3_moe": tiny_moe("qwen3_moe"),
    "deepseek_v2": tiny_moe("deepseek_v2"),
    "deepseek_v3": with_modules("deepseek_v3"),
    "deepseek_v32": with_modules("deepseek_v32"),
    "glm4_moe": with_modules("glm4_moe"),
    "glm_moe_dsa": with_modules("glm_moe_dsa"),
    "gemma3_text": lambda path, seed: louder(make_gemma3(path, "gemma3", seed, **TINY, **_EVERY_THIRD_FULL)),
    "gemma4_text": lambda path, seed: make_gemma4(path, seed=seed),
    "gpt_oss": lambda path, seed: louder(make_gpt_oss(path, "gpt_oss", seed, **TINY, sliding_window=WINDOW)),
    "granitemoehybrid": lambda path, seed: louder(make_granite(path, seed)),
    "qwen3_5_text": lambda path, seed: louder(make_qwen_hybrid(path, seed=seed, with_mtp=True)),
    "qwen3_5_moe_text": lambda path, seed: louder(make_qwen_hybrid(path, "qwen3_5_moe_text", seed, with_mtp=True)),
    "qwen3_next": lambda path, seed: louder(make_qwen_hybrid(path, "qwen3_next", seed, with_mtp=True)),
    "minimax_m2": written("minimax_m2"),
    "nemotron_h": written("nemotron_h"),
    "kimi_linear": written("kimi_linear"),
    "deepseek_v4": written("deepseek_v4"),
    "latents, window and states": every_kind,
    THREE_MODULES: with_modules("deepseek_v3", 3),
}

DRAFTERS: Mapping[str, DrafterEntry] = {
    "none": DrafterEntry(None, lambda target: None),
    "eagle": head("eagle"),
    "eagle3": head("eagle3"),
    "eagle3, d2t": head("eagle3", draft_vocab_size=100, num_attention_heads=2, num_key_value_heads=1),
    "eagle3.1": head("eagle3", fc_norm=True, norm_output=True),
    "eagle3, latents": DrafterEntry(lambda path, target, seed: latent_head(path, target, seed)),
    "mtp": DrafterEntry(
        lambda path, target, seed: mtp(),
        lambda target: None if target in WITH_ONE_MODULE else "no checkpoints of its type have one module",
    ),
    "mtp, three modules": DrafterEntry(
        lambda path, target, seed: mtp(),
        lambda target: None if target == THREE_MODULES else "the target has not three modules",
    ),
    "assistant": DrafterEntry(
        lambda path, target, seed: make_assistant(path, target, seed),
        lambda target: None if target == "gemma4_text" else "an assistant is for Gemma 4",
    ),
    "dflash": DrafterEntry(lambda path, target, seed: block_drafter(path, target, "dflash", NUM_DRAFTS)),
    "dspark": DrafterEntry(lambda path, target, seed: block_drafter(path, target, "dspark", NUM_DRAFTS)),
    "eagle3, auto k": auto(head("eagle3")),
    "draft_model, auto k": auto(whole(tiny("llama", num_hidden_layers=1, num_key_value_heads=1))),
    "ngram": DrafterEntry(lambda path, target, seed: ngram()),
    "draft_model": whole(tiny("llama", num_hidden_layers=1, num_key_value_heads=1)),
    "draft_model, window": DrafterEntry(lambda path, target, seed: windowed_draft_model(path)),
    "draft_model, latents": whole(tiny_moe("deepseek_v3", num_hidden_layers=2)),
    "draft_model, states": whole(lambda path, seed: louder(make_granite(path, seed))),
}

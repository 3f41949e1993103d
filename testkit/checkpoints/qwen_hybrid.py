"""Tiny random Qwen3.5 and Qwen3-Next, written by transformers, with an MTP module in Qwen's names if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from testkit.checkpoints.common import state_model_values, write_tokenizer

_TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
CLASSES = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}


def make_qwen_hybrid(
    path: str | Path,
    kind: str = "qwen3_5_text",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_mtp: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random model of `kind` to the directory `path`. Returns it. `overrides` replace fields of config.json."""
    import transformers

    directory, name = Path(path), CLASSES[kind]
    text = "Text" if kind.startswith("qwen3_5") else ""
    experts = _EXPERTS if kind != "qwen3_5_text" else {}
    config = getattr(transformers, f"{name}{text}Config")(**{**_TINY, **experts, **overrides})
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, weight in sorted(model.named_parameters()):
            weight.copy_(state_model_values(tensor_name, weight.shape, generator, _norm_mean))
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    if with_mtp:
        _add_mtp(directory, config, generator, dtype)
    return directory


def _norm_mean(name: str) -> float | None:
    """All but those of delta nets multiply by 1 + weight."""
    if "norm" not in name:
        return None
    return 1.0 if name.endswith("linear_attn.norm.weight") else 0.0


def _add_mtp(directory: Path, config: Any, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Add a module whose layer has the shapes of the model's last attention layer."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    size, layer = config.hidden_size, f"model.layers.{config.layer_types.index('full_attention')}."
    shapes = {f"mtp.layers.0.{n.removeprefix(layer)}": t.shape for n, t in tensors.items() if n.startswith(layer)}
    shapes |= {f"mtp.{part}.weight": torch.Size([size]) for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes |= {"mtp.norm.weight": torch.Size([size]), "mtp.fc.weight": torch.Size([size, 2 * size])}
    tensors |= {
        name: state_model_values(name, shape, generator, _norm_mean).to(dtype) for name, shape in sorted(shapes.items())
    }
    save_file(tensors, file, metadata={"format": "pt"})

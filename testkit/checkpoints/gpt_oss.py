"""Tiny random checkpoints of gpt-oss, made by transformers: plain, and with experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from testkit.checkpoints.common import NUM_BYTES, write_tokenizer

_TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "sliding_window": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 256,
    },
    "bos_token_id": NUM_BYTES,
    "eos_token_id": NUM_BYTES + 1,
}
# By name: changes to the tiny config.
GPT_OSS_SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    # The window is smaller than a page; one expert; three heads share one.
    "gpt_oss-odd": {
        "hidden_size": 60,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 22,
        "sliding_window": 5,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def make_gpt_oss(
    path: str | Path,
    shape: str = "gpt_oss",
    seed: int = 0,
    packed: bool = False,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Write a random gpt-oss of one of the shapes to the directory `path`. Returns it. `packed`: experts in MXFP4."""
    import transformers

    directory = Path(path)
    config = transformers.GptOssConfig(**{**_TINY, **GPT_OSS_SHAPES[shape], **overrides})
    model = transformers.GptOssForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.named_parameters()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            noise = 1.0 + 0.1 * noise
        elif "sinks" in name:
            noise = 2.0 * noise
        elif "embed_tokens" in name or "lm_head" in name or name.endswith("bias"):
            noise = 0.3 * noise
        else:
            # Stacked experts are stored [X, in, out], other weights [out, in].
            noise = noise * tensor.shape[1] ** -0.5 * (2.0 if "experts" in name else 1.0)
        tensor.data.copy_(noise)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    if packed:
        pack_experts(directory, generator)
    write_tokenizer(directory, config.vocab_size)
    return directory


def pack_experts(directory: Path, generator: torch.Generator) -> None:
    """Replace the experts' weights by random ones in MXFP4, whose scales differ by a factor of eight."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        weights[name + "_scales"] = torch.randint(121, 124, shape, generator=generator, dtype=torch.uint8)
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    skip = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skip}
    (directory / "config.json").write_text(json.dumps(config))

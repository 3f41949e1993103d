"""Tiny random checkpoints in Hugging Face format: config, safetensors, tokenizer.

Written without transformers. Weights are wide enough that the logits of a random model are not near-ties, so greedy
tokens of two correct implementations agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from baton.models.layers.linear import Build
from baton.models.loading.config_json import read_config
from baton.models.loading.dtypes import get_dtype
from baton.models.loading.filling import weight_table
from baton.models.loading.loader import load_model
from baton.models.registry import model_class

NUM_BYTES = 256
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TINY = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": NUM_BYTES,
    "eos_token_id": NUM_BYTES + 1,
    "torch_dtype": "float32",
}
_OWN: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}}


def make_checkpoint(path: str | Path, model_type: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random target of `model_type` (llama, mistral, qwen2, qwen3) to the directory `path`. Returns it.

    `overrides` replace fields of config.json. The vocabulary is the 256 bytes, then BOS, EOS and fillers.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    architecture = {"architectures": [_ARCHITECTURES.get(model_type, model_type)], "model_type": model_type}
    raw = {**architecture, **TINY, **_OWN.get(model_type, {}), **overrides}
    cls = model_class(model_type)
    model = cls(cls.parse_config(raw), Build(get_dtype(raw), torch.device("cpu")))
    _save(directory, raw, _random_weights(model, seed))
    write_tokenizer(directory, int(raw["vocab_size"]))
    return directory


def make_drafter(
    path: str | Path,
    method: str,
    target_path: str | Path,
    seed: int = 0,
    draft_vocab_size: int | None = None,
    **overrides: Any,
) -> Path:
    """Write a random head of `method` (eagle, eagle3) for the target in `target_path`. Returns `path`.

    With `draft_vocab_size` an EAGLE-3 head gets a reduced vocabulary: that many target ids, `d2t` and `t2d`.
    """
    from baton.drafters.eagle import Eagle
    from baton.drafters.eagle3 import Eagle3

    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    target, target_raw = load_model(target_path), read_config(target_path)
    # A head is a Llama layer for any target; only the sizes are the target's.
    inherited = {name: target_raw[name] for name in TINY if name in target_raw}
    # A target of experts alone has no such size.
    inherited.setdefault("intermediate_size", TINY["intermediate_size"])
    raw: dict[str, Any] = {**inherited, "model_type": "llama", "num_hidden_layers": 1, **overrides}
    raw.pop("tie_word_embeddings", None)
    extra: dict[str, Tensor] = {}
    names: set[str] = set()
    if method == "eagle3":
        raw["architectures"] = ["LlamaForCausalLMEagle3"]
        raw.setdefault("eagle_aux_hidden_state_layer_ids", _spread(len(target.kv_layers)))
        raw["draft_vocab_size"] = draft_vocab_size or target.vocab_size
        names.add("lm_head.weight")
        if draft_vocab_size is not None:
            names.add("d2t")
            extra = _reduced_vocabulary(draft_vocab_size, target.vocab_size, seed)
    else:
        raw["architectures"] = ["EagleLlamaForCausalLM"]
    config = model_class("llama").parse_config(raw)
    build = Build(get_dtype(raw), torch.device("cpu"))
    head = Eagle3(config, raw, target, names, build) if method == "eagle3" else Eagle(config, target, names, build)
    weights = {
        name.replace("layers.0.", "midlayer.") if method == "eagle3" else name: tensor
        for name, tensor in _random_weights(head, seed + 1).items()
        if name != "d2t"
    }
    _save(directory, raw, {**weights, **extra})
    return directory


def _spread(num_layers: int) -> list[int]:
    """Three distinct layers of a target too shallow for the usual choice."""
    return sorted({0, num_layers // 2, num_layers})


def _reduced_vocabulary(size: int, target_vocab: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(target_vocab, generator=generator)[:size].sort().values
    known = torch.zeros(target_vocab, dtype=torch.bool)
    known[kept] = True
    return {"d2t": kept - torch.arange(size), "t2d": known}


def _random_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Random values for every tensor of the module, with checkpoint names, in a fixed order."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    table = weight_table(module)
    for name in sorted(table):
        place = table[name].tensor
        if not place.is_floating_point():
            continue
        noise = torch.randn(place.shape, generator=generator)
        if "norm" in name:
            value = 1.0 + 0.1 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = 0.3 * noise
        else:
            value = noise * place.shape[1] ** -0.5
        weights[name] = value.to(place.dtype).contiguous()
    return weights


def state_model_values(
    name: str, shape: torch.Size, generator: torch.Generator, norm_mean: Callable[[str], float | None]
) -> Tensor:
    """Random float32 values with which states neither vanish nor explode. `norm_mean`: the mean of a norm's
    weights, None for a tensor that is none."""
    noise = torch.randn(shape, generator=generator)
    if (mean := norm_mean(name)) is not None:
        return torch.add(mean, noise, alpha=0.1)
    if name.endswith("A_log"):
        return noise - 2.0
    if name.endswith("bias"):
        return 0.1 * noise - (1.0 if name.endswith("dt_bias") else 0.0)
    if "embed" in name or "lm_head" in name:
        return 0.3 * noise
    scaled: Tensor = noise * shape[-1] ** -0.5
    return scaled


def _save(directory: Path, raw: Mapping[str, Any], weights: dict[str, Tensor]) -> None:
    _write_json(directory / "config.json", raw)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: token ids 0..255 are the bytes, in the order of their printable stand-ins."""
    if vocab_size < NUM_BYTES + 2:
        raise ValueError(f"vocab_size must be at least {NUM_BYTES + 2} for the byte-level tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fillers = [f"<filler_{i}>" for i in range(NUM_BYTES + 2, vocab_size)]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fillers])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": NUM_BYTES, "eos_token_id": NUM_BYTES + 1})

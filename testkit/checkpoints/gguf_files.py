"""GGUF files of tiny random models, written by the package `gguf` as llama.cpp's converter does."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.models.loading.gguf_config import MODEL_TYPES
from baton.models.loading.gguf_names import model_name

Type = gguf.GGMLQuantizationType
ARCHITECTURES = {model_type: architecture for architecture, model_type in MODEL_TYPES.items()}
_CONTROL, _NORMAL, _USER_DEFINED, _UNKNOWN, _BYTE = 3, 1, 4, 2, 6
# A token outside the alphabet of bytes.
OUTSIDE = "<\N{FULLWIDTH VERTICAL LINE}User\N{FULLWIDTH VERTICAL LINE}>"
_SPECIAL = ("<|begin|>", "<|end|>", "<|turn|>", OUTSIDE)
_MARKER = "<think>"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().splitlines()
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Places of float16 factors in a block, and values with which weights are as large as a random model's.
_BLOCKS: Mapping[Type, Mapping[int, float]] = {Type.Q4_K: {0: 2e-4, 2: 1.5e-3}, Type.Q6_K: {208: 5e-5}}


@functools.cache
def byte_level() -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with merges, split as Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    learned = sorted(state["vocab"], key=state["vocab"].__getitem__)
    tokens = [*learned, *_SPECIAL, _MARKER]
    first = len(learned)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * first + [_CONTROL] * len(_SPECIAL) + [_USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.eot_token_id": first + 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    }


@functools.cache
def sentencepiece() -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary with byte fallback, whose merges follow from scores."""
    learned = [token.replace("\u0120", _SPACE) for token in byte_level()["tokenizer.ggml.tokens"][256:400]]
    plain = [token for token in learned if token.isascii() or _SPACE in token]
    characters = sorted({character for token in plain for character in token})
    pieces = [*(token for token in plain if len(token) > 1), *characters]
    special, fallback = ["<unk>", "<s>", "</s>"], [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*special, *fallback, *pieces]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(number) for number in range(len(pieces))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    file: Path,
    checkpoint: Path,
    kind: Type = Type.F32,
    vocabulary: Mapping[str, Any] | None = None,
    further: Mapping[str, torch.Tensor] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write a checkpoint of Hugging Face's format to `file`, with matrices as `kind`. Types that `gguf` cannot make
    hold random blocks in place of the weights. `further`: more tensors. `changes`: of metadata, None leaves a field
    out. Returns `file`."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    values = {"general.name": "tiny", "rope.dimension_count": config["head_dim"]}
    values |= {name: config[field] for name, field in _FIELDS.items() if config.get(field) is not None}
    metadata = {name if "general" in name else f"{architecture}.{name}": value for name, value in values.items()}
    writer = gguf.GGUFWriter(file, architecture)
    metadata |= {**(byte_level() if vocabulary is None else vocabulary), **changes}
    for name, value in metadata.items():
        if value is not None:
            _add(writer, name, value)
    rng = np.random.default_rng(0)
    for name, values_of in _stored(load_file(checkpoint / "model.safetensors"), config).items():
        if values_of.ndim == 1:
            writer.add_tensor(name, values_of)
            continue
        writer.add_tensor(name, _encoded(values_of, kind, rng), raw_dtype=kind)
    for name, tensor in further.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](name, value)


def _stored(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """The tensors by GGUF's names: rows of a Llama's heads interleaved, the experts of a layer together."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for name in (f"blk.{layer}.{part}" for layer in range(config["num_hidden_layers"]) for part in _PARTS):
        usual = str(model_name(name))
        if "{}" in usual:
            experts = [usual.format(expert) for expert in range(config.get("num_experts", 0))]
            if experts and experts[0] in tensors:
                found[name] = torch.stack([tensors[expert] for expert in experts])
        elif usual in tensors:
            part, tensor = name.split(".")[2], tensors[usual]
            if config["model_type"] == "llama" and part in heads:
                tensor = tensor.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
            found[name] = tensor
    for name in ("token_embd.weight", "output_norm.weight", "output.weight"):
        if str(model_name(name)) in tensors:
            found[name] = tensors[str(model_name(name))]
    return {name: tensor.float().contiguous().numpy() for name, tensor in found.items()}


_PARTS = [
    f"{part}.{kind}"
    for part in (
        *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm"),
        *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    )
    for kind in ("weight", "bias")
]


def _encoded(values: NDArray[np.float32], kind: Type, rng: np.random.Generator) -> NDArray[Any]:
    if kind not in _BLOCKS:
        return gguf.quantize(values, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // numbers, size), dtype=np.uint8)
    for place, factor in _BLOCKS[kind].items():
        blocks[:, place : place + 2] = np.frombuffer(np.float16(factor).tobytes(), dtype=np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)

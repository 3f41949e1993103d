"""The `config.json` of a GGUF file, as transformers reads it, without torch. Unlike transformers 5.23, it keeps the
head size, rope scaling, and biases.
"""

from __future__ import annotations

import math
import struct
from math import prod
from reprlib import repr
from typing import Any

from baton.errors import CheckpointError
from baton.models.config import MAX_SIZE, RawConfig
from baton.models.loading.gguf_header import GgufHeader
from baton.models.loading.gguf_names import EMBEDDING, HEAD, ROPE_FACTORS, model_name

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_INSTEAD = "serve the model's checkpoint in safetensors"
# Fields of an architecture that change its computation, with their only supported values.
_ORDINARY: dict[str, Any] = {
    "attention.causal": True,
    "attention.scale": None,
    "attention.sliding_window": 0,
    "embedding_scale": 1,
    "expert_gating_func": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1,
    "logit_scale": 1,
    "pooling_type": 0,
    "residual_scale": 1,
    "rope.scale_linear": 1,
    "use_parallel_residual": False,
}
# `gguf`'s types of numbers outside blocks, and their dtypes.
FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
_FLOAT32 = 0
# Rope parameters of Llama 3.1 and later, whose files store only the factors.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Raises `CheckpointError`."""
    return _Metadata(header).config()


def gguf_form(raw: RawConfig) -> str | None:
    """None if the weights are not quantised."""
    types = raw.get("gguf_types")
    return f"GGUF ({', '.join(types)})" if types else None


class _Metadata:
    def __init__(self, header: GgufHeader) -> None:
        self._header, self._all = header, header.metadata
        what = self._all.get("general.type", "model")
        if what != "model":
            raise self._error(f"general.type is {repr(what)}, expected a model")
        self._architecture = str(self._all.get("general.architecture"))
        if self._architecture not in MODEL_TYPES:
            known, found = ", ".join(MODEL_TYPES), repr(self._architecture)
            raise self._error(f"general.architecture is {found}, expected one of {known}: {_INSTEAD}")

    def config(self) -> dict[str, Any]:
        import gguf

        for name, ordinary in _ORDINARY.items():
            if self._get(name, ordinary) != ordinary:
                raise self._error(f"{self._architecture}.{name} is {repr(self._get(name))}, which is not supported")
        tensors = self._header.tensors
        self._check_tensors()
        heads, size = self._need_int("attention.head_count"), self._need_int("embedding_length")
        turned = self._need_int("rope.dimension_count", size // heads)
        head_dim = self._need_int("attention.key_length", turned)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._get(name, head_dim) != head_dim:
                raise self._error(f"{self._architecture}.{name} is {repr(self._get(name))}, heads have {head_dim}")
        model_type = MODEL_TYPES[self._architecture]
        quantised = sorted({one.kind for one in tensors.values()} - FLOATS.keys())
        return {
            "model_type": model_type,
            "vocab_size": tensors[EMBEDDING].shape[0],
            "hidden_size": size,
            "intermediate_size": self._need_int("feed_forward_length"),
            "num_hidden_layers": self._need_int("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._need_int("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._need("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._need_int("context_length"),
            "rope_theta": self._need("rope.freq_base", 10000.0),
            "rope_scaling": self._rope(head_dim),
            "tie_word_embeddings": HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "dtype": "bfloat16" if quantised else FLOATS[tensors[EMBEDDING].kind],
            "gguf_types": [gguf.GGMLQuantizationType(kind).name for kind in quantised],
            **(self._experts() if model_type == "qwen3_moe" else {}),
            **{f"{name}_token_id": self._all.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")},
        }

    def _experts(self) -> dict[str, Any]:
        return {
            "num_experts": self._need_int("expert_count"),
            "num_experts_per_tok": self._need_int("expert_used_count"),
            "moe_intermediate_size": self._need_int("expert_feed_forward_length"),
            # As in llama.cpp; the files do not say so.
            "norm_topk_prob": True,
        }

    def _check_tensors(self) -> None:
        import gguf
        import numpy as np

        tensors = self._header.tensors
        if EMBEDDING not in tensors:
            raise self._error(f"no tensor {EMBEDDING}")
        for name in tensors:
            usual = None if name == ROPE_FACTORS else model_name(name)
            if name != ROPE_FACTORS and usual is None:
                raise self._error(f"unexpected tensor {name}")
            if usual is not None and "{}" in usual and tensors[name].shape[0] != self._get("expert_count"):
                num = tensors[name].shape[0]
                raise self._error(f"tensor {name} has {num} experts, expert_count is {repr(self._get('expert_count'))}")
        for kind in map(gguf.GGMLQuantizationType, {tensor.kind for tensor in tensors.values()} - FLOATS.keys()):
            try:
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                named = next(name for name, tensor in tensors.items() if tensor.kind == kind)
                raise self._error(f"tensor {named} is {kind.name}, which gguf cannot dequantise") from None

    def _rope(self, head_dim: int) -> dict[str, Any] | None:
        # As in llama.cpp, a factor without a type is linear.
        kind = self._get("rope.scaling.type", "linear" if self._get("rope.scaling.factor", 1) not in (0, 1) else "none")
        if kind == "none":
            return self._llama3(head_dim)
        if kind not in ("linear", "yarn"):
            raise self._error(f"{self._architecture}.rope.scaling.type is {repr(kind)}, expected linear or yarn")
        rope = {"rope_type": kind, "factor": self._need("rope.scaling.factor")}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self._need_int("rope.scaling.original_context_length")
        beside = {f"{self._architecture}.rope.scaling.{name}" for name in ("type", "factor", "finetuned")}
        beside.add(f"{self._architecture}.rope.scaling.original_context_length")
        for name in self._all:
            if name.startswith(f"{self._architecture}.rope.scaling.") and name not in beside:
                raise self._error(f"{name} is not supported")
        return rope

    def _llama3(self, head_dim: int) -> dict[str, Any] | None:
        """Llama 3.1's rope scaling, from the stored factors of the wavelengths."""
        stored = self._header.tensors.get(ROPE_FACTORS)
        if stored is None:
            return None
        if stored.kind != _FLOAT32 or prod(stored.shape) != -(-head_dim // 2):
            raise self._error(f"{ROPE_FACTORS} is not {-(-head_dim // 2)} numbers in float32")
        with self._header.path.open("rb") as file:
            file.seek(stored.start)
            factors = struct.unpack(f"<{stored.num_bytes // 4}f", file.read(stored.num_bytes))
        section: dict[str, Any] = {"rope_type": "llama3", "factor": max(factors, default=1.0), **_LLAMA3}
        theta = self._need("rope.freq_base", 10000.0)
        if not 1 <= theta < math.inf or not 1 <= section["factor"] < math.inf:
            raise self._error(f"{ROPE_FACTORS} with rope.freq_base {theta} is not supported")
        expected = _llama3_factors(section, theta, head_dim)
        if len(factors) != len(expected) or not all(map(_are_close, factors, expected)):
            raise self._error(f"{ROPE_FACTORS} holds other factors than Llama 3.1's: {_INSTEAD}")
        return section if section["factor"] > 1 else None

    def _need_int(self, name: str, default: int | None = None) -> int:
        """Raises `CheckpointError` outside of [1, `MAX_SIZE`]."""
        value = self._need(name, default)
        if type(value) is int and 1 <= value <= MAX_SIZE:
            return value
        raise self._error(f"{self._architecture}.{name} is {value}, expected an integer from 1 to {MAX_SIZE}")

    def _need(self, name: str, default: Any = None) -> Any:
        value = self._get(name, default)
        if isinstance(value, int | float):
            return value
        is_list = isinstance(value, list)
        why = "differs between layers, which is not supported" if is_list else f"is {repr(value)}, no number"
        raise self._error(f"{self._architecture}.{name} {'is missing' if value is None else why}")

    def _get(self, name: str, default: Any = None) -> Any:
        return self._all.get(f"{self._architecture}.{name}", default)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._header.path}: {what}")


def _llama3_factors(section: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """Source: llama.cpp's convert_hf_to_gguf.py, `generate_extra_tensors`."""
    low, high, factors = section["low_freq_factor"], section["high_freq_factor"], []
    for i in range(0, head_dim, 2):
        turns = section["original_max_position_embeddings"] / (2 * math.pi * theta ** (i / head_dim))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share) / section["factor"] + share))
    return factors


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)

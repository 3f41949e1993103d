"""Reads a decoder's `config.json` into typed values.

A missing, mistyped or unsupported value raises a `CheckpointError` that names the field. Defaults are Hugging Face's.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import CheckpointError
from baton.models.layers.specs import LatentSpec, MoESpec

RawConfig = Mapping[str, Any]

# Far above any model: a hostile file must not choose the sizes of loops and tensors.
MAX_SIZE = 1 << 31
_MAX_FLOAT = 2.0**127
MAX_LAYERS = 4096

# Fields that change any decoder's computation, with their only supported value.
_OF_ATTENTION = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


# Required and optional parameters of each type of rotary embedding.
_ROPE_PARAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: type, base, and the type's own parameters (numbers, without nulls)."""

    kind: str
    theta: float
    params: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention and a SwiGLU MLP.

    `windows`: each layer's sliding window in tokens, None for full attention. `rotary_dim`: the rotated leading
    dimensions of a head, None for all. `layer_ropes`, `layer_rotary_dims`: by layer, empty if all have `rope` and
    `rotary_dim`. `attention_multiplier`: the scale of attention scores, None for head_dim^-0.5. `has_sinks`: each head
    has an extra logit in the softmax. `norm_offset` None: norms round to the model's dtype, then multiply by the
    weight; else they multiply by weight + offset in float32, then round. `moe` replaces some layers' MLP, `latent`
    grouped-query attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int
    rope: RopeSpec
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rotary_dim: int | None = None
    layer_ropes: tuple[RopeSpec, ...] = ()
    layer_rotary_dims: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    has_sinks: bool = False
    norm_offset: float | None = None
    moe: MoESpec | None = None
    latent: LatentSpec | None = None


ROPE_TYPES = (*_ROPE_PARAMS, "proportional")


def get_int(raw: RawConfig, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
    """Raises `CheckpointError` outside of [minimum, maximum]."""
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        problem = "is missing" if value is None else f"is {value!r}"
        raise CheckpointError(f"config.json: {name} {problem}, expected an integer of at least {minimum}")
    if value > maximum:
        raise CheckpointError(f"config.json: {name} is over {maximum}")
    return value


def get_float(raw: RawConfig, name: str, default: float | None = None) -> float:
    """Raises `CheckpointError` unless positive."""
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_FLOAT:
        problem = "is missing" if value is None else f"is {reprlib.repr(value)}"
        raise CheckpointError(f"config.json: {name} {problem}, expected a positive float32")
    return float(value)


def get_bool(raw: RawConfig, name: str, default: bool = False) -> bool:
    """Null is false, and refused if `default` is true. Raises `CheckpointError`."""
    value = raw.get(name, default)
    if value is None and not default:
        return False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} is {value!r}, expected true or false")
    return value


def get_rope(raw: RawConfig, max_position: int) -> RopeSpec:
    """From the old fields (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`)."""
    return read_rope(rope_section(raw), raw, max_position)


def rope_section(raw: RawConfig) -> RawConfig:
    """`rope_parameters`, or `rope_scaling` of old configs, else empty. Raises `CheckpointError` if the two differ."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    section = new or old or {}
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: rope_parameters is {section!r}, expected an object")
    if new and old and _spelt_out(new, raw) != _spelt_out(old, raw):
        raise CheckpointError("config.json: rope_parameters and rope_scaling differ")
    return section


def _spelt_out(section: object, raw: RawConfig) -> object:
    """A rope section with its sibling fields, and its type under one name, for comparison."""
    if not isinstance(section, Mapping):
        return section
    beside = {name: raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    beside["original_max_position_embeddings"] = raw.get("max_position_embeddings")
    own = {name: value for name, value in section.items() if name not in ("rope_type", "type") and value is not None}
    return {**beside, **own, "rope_type": section.get("rope_type", section.get("type", "default"))}


def read_rope(section: RawConfig, raw: RawConfig, max_position: int, theta_default: float = 10000.0) -> RopeSpec:
    """Fields that `section` lacks are read from `raw`.

    Raises `CheckpointError`.
    """
    kind = section.get("rope_type", section.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_PARAMS:
        known = ", ".join(_ROPE_PARAMS)
        raise CheckpointError(f"config.json: rope_parameters.rope_type is {kind!r}, expected one of {known}")
    theta = get_float(section if "rope_theta" in section else raw, "rope_theta", theta_default)
    if theta < 1.0:
        raise CheckpointError(f"config.json: rope_theta is {theta}, expected at least 1")
    needed, optional = _ROPE_PARAMS[kind]
    params: dict[str, float] = {}
    for name, value in section.items():
        if name in ("rope_type", "type", "rope_theta", "partial_rotary_factor") or value is None:
            continue
        served = name in needed + optional and isinstance(value, int | float)
        if not served or not abs(value) <= sys.float_info.max:
            shown = reprlib.repr(value)
            raise CheckpointError(
                f"config.json: rope_parameters.{name} is {shown}, which is not supported for rope_type {kind!r}"
            )
        params[name] = float(value)
    if "original_max_position_embeddings" in optional:
        # The top-level field takes precedence, as in transformers.
        where = raw if raw.get("original_max_position_embeddings") is not None else section
        original = get_int(where, "original_max_position_embeddings", max_position)
        params["original_max_position_embeddings"] = float(original)
        # A null factor of YaRN is the ratio of the two lengths; a missing one is an error.
        if kind == "yarn" and "factor" in section:
            params.setdefault("factor", max_position / original)
    for name in needed:
        if not params.get(name, 0) > 0:
            problem = f"is {section[name]!r}" if name in section else "is missing"
            raise CheckpointError(f"config.json: rope_parameters.{name} {problem} for rope_type {kind!r}")
    return RopeSpec(kind=kind, theta=theta, params=params)


def context_length(rope: RopeSpec, max_position: int) -> int:
    """The longest context. Linear scaling multiplies `max_position_embeddings`, as in vLLM. With YaRN that field is the
    result or, in Qwen's guides, still the original length.
    """
    if rope.kind not in ("linear", "yarn"):
        return max_position
    trained = rope.params.get("original_max_position_embeddings", max_position)
    return max(max_position, int(min(trained * rope.params["factor"], MAX_SIZE)))


def get_rotary_dim(raw: RawConfig, head_dim: int, default_factor: float) -> int:
    """Null is 1. Raises `CheckpointError` for 0 or an odd number."""
    given = {"partial_rotary_factor": default_factor, **raw, **rope_section(raw)}
    factor = get_float(given, "partial_rotary_factor", 1.0)
    dim = int(head_dim * min(factor, 2.0))
    if not 0 < dim <= head_dim or dim % 2:
        raise CheckpointError(f"config.json: partial_rotary_factor {factor} rotates {dim} dimensions of {head_dim}")
    return dim


def layer_windows(raw: RawConfig, num_layers: int) -> tuple[int | None, ...]:
    """From Qwen's fields: `use_sliding_window`, and `layer_types` or `max_window_layers`."""
    window = get_int(raw, "sliding_window", 4096) if get_bool(raw, "use_sliding_window") else None
    if raw.get("layer_types") is None:
        first = get_int(raw, "max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    slides = sliding_layers(raw["layer_types"], num_layers)
    if window is None and any(slides):
        raise CheckpointError("config.json: layer_types has sliding_attention, use_sliding_window is false")
    return tuple(window if slide else None for slide in slides)


def sliding_layers(types: object, num_layers: int) -> tuple[bool, ...]:
    """Layers with a window, from `layer_types`."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise CheckpointError(f"config.json: layer_types must be {num_layers} of {' or '.join(known)}, got {types!r}")
    return tuple(kind == "sliding_attention" for kind in types)


def decoder_fields(
    raw: RawConfig,
    max_position_default: int,
    head_dim_default: int | None = None,
    partial_rotary_default: float | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """Fields of all decoders, as keyword arguments of `ModelConfig`. Raises `CheckpointError`.

    `head_dim_default` None: hidden size / heads. `partial_rotary_default` None: only whole heads can be rotated.
    `activation`: the field's name and its only supported value. `windows`: full attention everywhere.
    """
    for name, ordinary in _OF_ATTENTION.items():
        if raw.get(name) not in (None, ordinary):
            raise CheckpointError(f"config.json: {name} is {raw[name]!r}, which is not supported")
    field, known = activation
    if raw.get(field, known) != known:
        raise CheckpointError(f"config.json: {field} is {raw[field]!r}, only {known!r} is supported")
    if (quantization := raw.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise CheckpointError(f"config.json: quantization_config is set ({method!r}), such weights are not supported")
    hidden, heads = get_int(raw, "hidden_size"), get_int(raw, "num_attention_heads")
    kv_heads = get_int(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = get_int(raw, "head_dim", head_dim_default or max(hidden // heads, 1))
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim is {head_dim}, rotary embedding needs an even one")
    max_position = get_int(raw, "max_position_embeddings", max_position_default)
    num_layers = get_int(raw, "num_hidden_layers", maximum=MAX_LAYERS)
    rotary_dim = get_rotary_dim(raw, head_dim, partial_rotary_default or 1.0)
    rope = get_rope(raw, max_position)
    if partial_rotary_default is None and rotary_dim != head_dim:
        raise CheckpointError("config.json: partial_rotary_factor other than 1.0 is not supported")
    return {
        "vocab_size": get_int(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get_int(raw, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_eps": get_float(raw, "rms_norm_eps", 1e-6),
        "max_position": context_length(rope, max_position),
        "rope": rope,
        "rotary_dim": rotary_dim,
        "windows": (None,) * num_layers,
        "tie_word_embeddings": get_bool(raw, "tie_word_embeddings"),
    }

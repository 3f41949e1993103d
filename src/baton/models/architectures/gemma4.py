"""Gemma 4 (`model_type` gemma4_text; Google, 2026), text only: see `families.gemma4`.

The last layers may share the keys and values of the last layer of their kind that has its own. With per-layer inputs,
each layer gets a small vector for each row's token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton.errors import CheckpointError, ConfigError
from baton.models.base import CausalLM, Decoder, Embedding
from baton.models.config import (
    ModelConfig,
    RawConfig,
    RopeSpec,
    decoder_fields,
    get_bool,
    get_float,
    get_int,
    read_rope,
    sliding_layers,
)
from baton.models.families.gemma4 import Gemma4Config, Gemma4Layer
from baton.models.layer_cache import LayerSpec, SharedLayerSpec
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build, Linear
from baton.models.layers.parallel import stage_layers
from baton.models.layers.specs import MoESpec
from baton.models.loading.tensor_names import layer_index, split_experts

_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# Layers that share keys and values do not load these, as in transformers.
_OWN = ("k_proj.", "v_proj.", "k_norm.")
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def rounded(number: float, build: Build) -> float:
    return float(torch.tensor(number, dtype=build.dtype))


class Gemma4Decoder(Decoder):
    """Per-layer inputs: (norm(projection of the embedding) + second embedding) / sqrt(2), [T, P] for each layer."""

    def __init__(self, config: ModelConfig, layers: Mapping[int, nn.Module], build: Build) -> None:
        super().__init__(config, layers, build)
        size = self._size = cast(Gemma4Config, config).per_layer_size
        if size:
            width = config.num_layers * size
            self.embed_tokens_per_layer = Embedding(config.vocab_size, width, build)
            self.per_layer_model_projection = Linear(config.hidden_size, width, build)
            self.per_layer_projection_norm = make_norm(config, size, build)
            self._scale = rounded(size**0.5, build)

    def layer_inputs(self, input_ids_T: Tensor, embeds_TE: Tensor) -> Mapping[int, tuple[Tensor, ...]]:
        if not self._size:
            return {}
        shape = len(input_ids_T), -1, self._size
        projected = self.per_layer_model_projection(embeds_TE) * self._config.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.view(shape))
        own = (self.embed_tokens_per_layer(input_ids_T) * self._scale).view(shape)
        return {layer: (part,) for layer, part in enumerate(((projected + own) * 2.0**-0.5).unbind(dim=1))}


class Gemma4(CausalLM):
    """Raises `ConfigError` for pipeline stages that would have to exchange per-layer inputs, or keys and values that
    layers share."""

    decoder = Gemma4Decoder
    own_parts = ("model.embed_tokens_per_layer.", "model.per_layer_")

    def __init__(self, config: ModelConfig, build: Build) -> None:
        gemma, num_stages = cast(Gemma4Config, config), build.ranks.stage.count
        stages = [stage_layers(config.num_layers, index, num_stages) for index in range(num_stages)]
        if num_stages > 1 and gemma.per_layer_size:
            raise ConfigError("pipeline_parallel_size", f"is {num_stages}, and stages do not exchange per-layer inputs")
        if any(gemma.sources[layer] not in own for own in stages for layer in own):
            what = "keys and values that layers share"
            raise ConfigError("pipeline_parallel_size", f"is {num_stages}, and stages do not exchange {what}")
        super().__init__(replace(config, embedding_multiplier=rounded(config.embedding_multiplier, build)), build)

    @classmethod
    def parse_config(cls, raw: RawConfig) -> Gemma4Config:
        return parse_gemma4(raw, get_int(raw, "num_kv_shared_layers", 0, minimum=0))

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        gemma = cast(Gemma4Config, config)
        source = gemma.sources[layer_id]
        return gemma.spec(layer_id) if source == layer_id else SharedLayerSpec(source)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return Gemma4Layer(cast(Gemma4Config, config), layer_id, build)

    def stored_name(self, name: str) -> str | None:
        layer, sources = layer_index(name), cast(Gemma4Config, self.config).sources
        part = name.rpartition(".self_attn.")[2]
        if layer is not None and layer < len(sources) and sources[layer] != layer and part.startswith(_OWN):
            return None
        return super().stored_name(name)

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if not name.endswith(_STACKED):
            return ((name, tensor),)
        moe = self.config.moe
        return split_experts(name, tensor, *((moe.num_experts, moe.intermediate_size) if moe else (0, 0)))

    def compute_logits(self, hidden_TE: Tensor) -> Tensor:
        logits, cap = self.project(hidden_TE), cast(Gemma4Config, self.config).softcap
        return (logits if cap is None else torch.tanh(logits / cap) * cap).float()


def parse_gemma4(raw: RawConfig, num_shared: int) -> Gemma4Config:
    """`num_shared`: the last layers that share keys and values. Raises `CheckpointError`."""
    raw = {**_DEFAULTS, **raw}
    handled = {"rope_parameters": None, "rope_scaling": None, "final_logit_softcapping": None}
    if raw.get("use_bidirectional_attention") == "vision":
        handled["use_bidirectional_attention"] = None  # for images
    fields = decoder_fields({**raw, **handled}, 131072, head_dim_default=256, activation=_ACTIVATION)
    layers, heads = fields["num_layers"], fields["num_heads"]
    slides = _sliding(raw, layers)
    window = get_int({"sliding_window": 512, **raw}, "sliding_window") if any(slides) else None
    k_is_v = get_bool(raw, "attention_k_eq_v")
    full_kv_heads, full_head_dim = _full_heads(raw, slides, fields["num_kv_heads"], k_is_v)
    if heads % full_kv_heads or full_head_dim % 2:
        what = f"{full_kv_heads} heads of {full_head_dim}"
        raise CheckpointError(f"config.json: full layers have {what} for keys, and {heads} for queries")
    local, full = _ropes(raw, fields["max_position"])
    bias, softcap = get_bool(raw, "attention_bias"), raw.get("final_logit_softcapping")
    per_layer = get_int(raw, "hidden_size_per_layer_input", 256, minimum=0)
    if per_layer and get_int(raw, "vocab_size_per_layer_input", 262144) != fields["vocab_size"]:
        size = raw.get("vocab_size_per_layer_input", 262144)
        raise CheckpointError(f"config.json: vocab_size_per_layer_input is {size}, vocab_size {fields['vocab_size']}")
    wide, first_shared = 1 + get_bool(raw, "use_double_wide_mlp"), layers - num_shared
    return Gemma4Config(
        **{
            **fields,
            "rope": full,
            "layer_ropes": tuple(local if slide else full for slide in slides),
            "layer_rotary_dims": tuple(fields["head_dim"] if slide else full_head_dim for slide in slides),
            "windows": tuple(window if slide else None for slide in slides),
            "embedding_multiplier": fields["hidden_size"] ** 0.5,
        },
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norm_offset=0.0,
        moe=_experts(raw, layers),
        full_head_dim=full_head_dim,
        full_kv_heads=full_kv_heads,
        sources=_sources(slides, first_shared),
        mlp_sizes=tuple(fields["intermediate_size"] * (wide if i >= first_shared else 1) for i in range(layers)),
        k_is_v=k_is_v,
        per_layer_size=per_layer,
        softcap=None if softcap is None else get_float(raw, "final_logit_softcapping"),
    )


def _sliding(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """The last layer has no window, as in transformers."""
    types = raw.get("layer_types")
    slides = tuple((i + 1) % 6 > 0 for i in range(num_layers)) if types is None else sliding_layers(types, num_layers)
    return (*slides[:-1], False)


def _full_heads(raw: RawConfig, slides: tuple[bool, ...], kv_heads: int, k_is_v: bool) -> tuple[int, int]:
    """Number and size of full layers' key heads, also from transformers 5's `per_layer_config`. Raises
    `CheckpointError` if layers of a kind differ.
    """
    given = raw.get("per_layer_config")
    if given is None:
        own = get_int(raw, "num_global_key_value_heads", kv_heads) if k_is_v else kv_heads
        return own, get_int(raw, "global_head_dim", 512)
    plain = {"num_key_value_heads": kv_heads, "head_dim": get_int(raw, "head_dim", 256)}
    wrong = CheckpointError("config.json: per_layer_config must give all full layers the same heads, and no others any")
    try:
        by_layer = {int(layer): dict(values) for layer, values in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise wrong from None
    full = by_layer.get(slides.index(False), {})
    if any(by_layer.get(i, {}) != ({} if slide else full) for i, slide in enumerate(slides)) or full.keys() - plain:
        raise wrong
    merged = {**plain, **full}
    return get_int(merged, "num_key_value_heads"), get_int(merged, "head_dim")


def _sources(slides: tuple[bool, ...], first_shared: int) -> tuple[int, ...]:
    """For layers that share: the last of their kind with its own keys and values. Raises `CheckpointError` if none."""
    last = {slide: layer for layer, slide in enumerate(slides[: max(first_shared, 0)])}
    if missing := set(slides) - set(last):
        kind = "sliding_attention" if missing == {True} else "full_attention"
        raise CheckpointError(f"config.json: num_kv_shared_layers leaves no layer of {kind} with keys of its own")
    return tuple(layer if layer < first_shared else last[slide] for layer, slide in enumerate(slides))


def _ropes(raw: RawConfig, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """Rotary embeddings of windowed and of full layers. Raises `CheckpointError`."""
    given = raw.get("rope_parameters") or _ROPES
    if not isinstance(given, Mapping) or given.keys() != _ROPES.keys() or raw.get("rope_scaling"):
        raise CheckpointError(f"config.json: rope_parameters is {given!r}, expected an object for each type of layer")
    local, full = (_rope(given[kind], kind, max_position) for kind in _ROPES)
    return local, full


def _rope(section: object, kind: str, max_position: int) -> RopeSpec:
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {kind} of rope_parameters is {section!r}, expected an object")
    if section.get("rope_type") != "proportional":
        if section.get("partial_rotary_factor") not in (None, 1.0):
            raise CheckpointError(f"config.json: {kind} of rope_parameters is {section!r}, which is not supported")
        return read_rope(section, {}, max_position)
    params = {name: get_float(section, name, 1.0) for name in ("partial_rotary_factor", "factor")}
    return RopeSpec("proportional", get_float(section, "rope_theta"), params)


def _experts(raw: RawConfig, num_layers: int) -> MoESpec | None:
    if not get_bool(raw, "enable_moe_block"):
        return None
    num, top_k, size = (get_int(raw, name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    return MoESpec((True,) * num_layers, num, top_k, size, renormalise=True)

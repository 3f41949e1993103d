"""Gemma 3 (`model_type` gemma3_text; arXiv:2503.19786): five windowed layers per full one, each kind with its own
rotary embedding.

Attention and MLP each have a norm before and one after, which multiply by 1 + weight in float32. Embeddings are
multiplied by the square root of the hidden size, rounded to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.kernels.cpu.elementwise import gelu_mul
from baton.models.base import CausalLM
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
from baton.models.layer_cache import Attend
from baton.models.layers.decoder_layer import MLP, Attention
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build

_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


class Gemma3(CausalLM):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        rounded = torch.tensor(config.embedding_multiplier, dtype=build.dtype)
        super().__init__(replace(config, embedding_multiplier=float(rounded)), build)

    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        raw = {**_DEFAULTS, **raw}
        without = {"rope_parameters": None, "rope_scaling": None}
        fields = decoder_fields({**raw, **without}, 131072, head_dim_default=256, activation=_ACTIVATION)
        slides = _sliding(raw, fields["num_layers"])
        # Null is refused: windowed layers need a window.
        window = get_int({"sliding_window": 4096, **raw}, "sliding_window") if any(slides) else None
        full, local = _ropes(raw, fields["max_position"])
        bias = get_bool(raw, "attention_bias")
        return ModelConfig(
            **{
                **fields,
                "rope": full,
                "layer_ropes": tuple(local if slide else full for slide in slides),
                "windows": tuple(window if slide else None for slide in slides),
                "qkv_bias": bias,
                "o_bias": bias,
                "qk_norm": True,
                "norm_offset": 1.0,
                "embedding_multiplier": fields["hidden_size"] ** 0.5,
                "attention_multiplier": get_float(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
            }
        )

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return Gemma3Layer(config, layer_id, build)


class Gemma3Layer(nn.Module):
    """x + norm(attention(norm(x))), then + norm(MLP(norm(.))). [T, E] -> [T, E]."""

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size, build)
        self.self_attn = Attention(config, layer_id, build)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, build)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size, build)
        self.mlp = GeluMLP(config.hidden_size, config.intermediate_size, False, build)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos_sin, attend))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]


class GeluMLP(MLP):
    """GeGLU (Shazeer, 2020, arXiv:2002.05202): down(gelu(gate(x)) * up(x)), [T, E] -> [T, E]."""

    def gated(self, gate_up: Tensor) -> Tensor:
        return gelu_gate(gate_up, self._on_cpu)


def gelu_gate(gate_up: Tensor, on_cpu: bool) -> Tensor:
    """gelu(gate) * up of gates and ups side by side, [T, 2I] -> [T, I]."""
    if on_cpu:
        return gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _sliding(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """Layers with a window, by `layer_types`, or `sliding_window_pattern` of old configs."""
    if raw.get("layer_types") is not None:
        return sliding_layers(raw["layer_types"], num_layers)
    pattern = get_int(raw, "sliding_window_pattern", 6)
    return tuple(bool((layer + 1) % pattern) for layer in range(num_layers))


def _ropes(raw: RawConfig, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """Rotary embeddings of full and of windowed layers. In old configs `rope_theta` and `rope_scaling` are for full
    layers, `rope_local_base_freq` for windowed ones."""
    given = raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or given.keys() - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"config.json: rope_parameters is {given!r}, expected an object for each type of layer")
    full, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    scaling = raw.get("rope_scaling") or {}
    for name, section in (("full_attention", full), ("sliding_attention", local), ("rope_scaling", scaling)):
        if not isinstance(section, Mapping) or section.get("partial_rotary_factor") not in (None, 1.0):
            raise CheckpointError(f"config.json: {name} of rope_parameters is {section!r}, which is not supported")
    if "type" in scaling and "rope_type" not in scaling:
        # transformers ignores it.
        raise CheckpointError(f"config.json: rope_scaling is {scaling!r}, expected it with rope_type")
    local_base = {"rope_theta": raw.get("rope_local_base_freq")}
    return (
        read_rope({**full, **scaling}, raw, max_position, theta_default=1e6),
        read_rope(local, local_base, max_position, theta_default=1e4),
    )

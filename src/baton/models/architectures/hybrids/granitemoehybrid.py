"""Granite 4 hybrids (`model_type` granitemoehybrid): Mamba-2 and attention layers in any order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, get_float, get_int
from baton.models.layer_cache import LayerCache, LayerSpec
from baton.models.layers.decoder_layer import MLP, Attention
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build
from baton.models.layers.mamba2 import Mamba2, Mamba2Spec, stored_parts
from baton.models.layers.moe import Router, mlp_experts
from baton.models.layers.specs import MoESpec
from baton.models.loading.tensor_names import split_rows

_RECURRENT = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")
_MLP_LAYERS = ("input_linear", "output_linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """`is_recurrent[l]`: layer l is a Mamba-2 layer. `shared_size`: width of the MLP that all rows pass."""

    is_recurrent: tuple[bool, ...]
    mamba: Mamba2Spec
    shared_size: int
    residual_multiplier: float
    logits_scaling: float
    rotates: bool


class GraniteMoeHybrid(CausalLM):
    """Multiplies embeddings, residuals, attention scores and logits."""

    @classmethod
    def parse_config(cls, raw: RawConfig) -> GraniteConfig:
        fields = decoder_fields(raw, max_position_default=2048)
        bias = get_bool(raw, "attention_bias")
        position = raw.get("position_embedding_type")
        if position not in (None, "nope", "rope"):
            raise CheckpointError(f"config.json: position_embedding_type is {position!r}, expected nope or rope")
        return GraniteConfig(
            **fields,
            qkv_bias=bias,
            o_bias=bias,
            moe=_experts(raw, fields),
            embedding_multiplier=get_float(raw, "embedding_multiplier", 1.0),
            attention_multiplier=get_float(raw, "attention_multiplier", 1.0),
            residual_multiplier=get_float(raw, "residual_multiplier", 1.0),
            logits_scaling=get_float(raw, "logits_scaling", 1.0),
            is_recurrent=_layer_kinds(raw, fields["num_layers"]),
            mamba=_mamba_spec(raw, fields["hidden_size"]),
            shared_size=get_int(raw, "shared_intermediate_size", 1024),
            rotates=position == "rope",
        )

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        granite = cast(GraniteConfig, config)
        return granite.mamba.state_spec if granite.is_recurrent[layer_id] else super().kv_layer(config, layer_id)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return GraniteLayer(cast(GraniteConfig, config), layer_id, build)

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Splits gates and ups, a layer's experts, or the parts of a Mamba-2 projection."""
        granite, (owner, _, kind) = cast(GraniteConfig, self.config), name.rpartition(".")
        place, _, layer = owner.rpartition(".")
        if place.endswith(".mamba") and (parts := stored_parts(granite.mamba).get(layer)):
            for part, values in split_rows(name, tensor, parts):
                yield f"{owner}.{part}.{kind}", values
        elif layer in _MLP_LAYERS and place.endswith(".shared_mlp"):
            yield from _of_mlp(name, place, layer, tensor, granite.shared_size)
        elif layer in _MLP_LAYERS and place.endswith(".block_sparse_moe") and granite.moe is not None:
            if tensor.dim() != 3 or len(tensor) != granite.moe.num_experts:
                shape = f"has shape {list(tensor.shape)}, expected 3 dimensions, the first of {granite.moe.num_experts}"
                raise CheckpointError(f"tensor {name} {shape} experts")
            for expert, values in enumerate(tensor):
                where = f"{place}.experts.{expert}"
                yield from _of_mlp(name, where, layer, values, granite.moe.intermediate_size)
        else:
            yield name, tensor

    def compute_logits(self, hidden_TE: Tensor) -> Tensor:
        return super().compute_logits(hidden_TE) / cast(GraniteConfig, self.config).logits_scaling


class GraniteLayer(nn.Module):
    """x + m mixer(norm(x)), then + m MLP(norm(.)), with Mamba-2 or attention as mixer. [T, E] -> [T, E]."""

    def __init__(self, config: GraniteConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_eps
        self._multiplier, self._rotates = config.residual_multiplier, config.rotates
        self.input_layernorm = RMSNorm(size, eps, build)
        self.mamba = Mamba2(config.mamba, size, eps, layer_id, build) if config.is_recurrent[layer_id] else None
        self.self_attn = None if self.mamba is not None else Attention(config, layer_id, build)
        self.post_attention_layernorm = RMSNorm(size, eps, build)
        self.block_sparse_moe = None if config.moe is None else SparseMoE(config.moe, size, build)
        self.shared_mlp = MLP(size, config.shared_size, False, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        normed = self.input_layernorm(x)
        if self.self_attn is not None:
            mixed = self.self_attn(normed, cos_sin if self._rotates else None, cache)
        else:
            assert self.mamba is not None
            mixed = self.mamba(normed, cache)
        x = x + mixed * self._multiplier
        normed = self.post_attention_layernorm(x)
        out: Tensor = self.shared_mlp(normed)
        if self.block_sparse_moe is not None:
            out = self.block_sparse_moe(normed) + out
        return x + out * self._multiplier


class SparseMoE(nn.Module):
    """The routed experts, each a SwiGLU MLP: [T, E] -> [T, E]."""

    def __init__(self, spec: MoESpec, hidden: int, build: Build) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"layer": Router(spec, hidden, build)})
        self.experts = mlp_experts(spec, hidden, build)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts.weighted_sum(x, *cast(Router, self.router["layer"]).choose(x))


def _of_mlp(name: str, place: str, layer: str, tensor: Tensor, size: int) -> Iterable[tuple[str, Tensor]]:
    """The weights in one stored tensor of the MLP at `place`, of inner size `size`."""
    if layer == _MLP_LAYERS[1]:
        yield f"{place}.down_proj.weight", tensor
        return
    for part, values in split_rows(name, tensor, {"gate_proj": size, "up_proj": size}):
        yield f"{place}.{part}.weight", values


def _experts(raw: RawConfig, fields: dict[str, Any]) -> MoESpec | None:
    """Granite's softmax over the chosen logits equals a renormalised one over all."""
    num_experts = get_int(raw, "num_local_experts", 8, minimum=0)
    if num_experts == 0:
        return None
    top_k, layers = get_int(raw, "num_experts_per_tok", 2), (True,) * fields["num_layers"]
    return MoESpec(layers, num_experts, top_k, fields["intermediate_size"], renormalise=True)


def _layer_kinds(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or [_RECURRENT[0]] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in _RECURRENT + _ATTENTION for k in kinds):
        raise CheckpointError(f"config.json: layer_types must be {num_layers} of mamba or attention, got {kinds!r}")
    return tuple(kind in _RECURRENT for kind in kinds)


def _mamba_spec(raw: RawConfig, hidden: int) -> Mamba2Spec:
    num_heads, inner = get_int(raw, "mamba_n_heads", 128), get_int(raw, "mamba_expand", 2) * hidden
    num_groups = get_int(raw, "mamba_n_groups", 1)
    stated = raw.get("mamba_d_head", "auto")
    head_dim = inner // num_heads if stated in ("auto", None) else get_int(raw, "mamba_d_head")
    if head_dim * num_heads != inner:
        raise CheckpointError(f"config.json: mamba_n_heads {num_heads} of mamba_d_head {head_dim} are not {inner} wide")
    if num_heads % num_groups:
        raise CheckpointError(f"config.json: mamba_n_heads {num_heads} is no multiple of mamba_n_groups {num_groups}")
    refuse_limit(raw.get("time_step_limit"))
    return Mamba2Spec(
        num_heads,
        head_dim,
        num_groups,
        get_int(raw, "mamba_d_state", 256),
        get_int(raw, "mamba_d_conv", 4, minimum=2),
        get_bool(raw, "mamba_conv_bias", True),
        get_bool(raw, "mamba_proj_bias"),
    )


def refuse_limit(limit: Any) -> None:
    """transformers applies time step limits to prompts but not to later tokens, so no result would be right."""
    if limit is None:
        return
    ends = list(limit) if isinstance(limit, list | tuple) else [limit]
    # How transformers writes infinity, which JSON lacks.
    if [math.inf if end == {"__float__": "Infinity"} else end for end in ends] != [0.0, math.inf]:
        raise CheckpointError(f"config.json: time_step_limit is {limit!r}, only [0, Infinity] is supported")

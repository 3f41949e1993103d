"""Nemotron-H and Nemotron 3 (`model_type` nemotron_h): each layer is a Mamba-2 layer, attention without positions, an
MLP, or experts (arXiv:2504.03624). Steps of Mamba-2 are not clamped, as in vLLM; transformers clamps them to
`time_step_min`, in prompts only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.architectures.hybrids.granitemoehybrid import refuse_limit
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, get_float, get_int
from baton.models.families.deepseek import require_value
from baton.models.layer_cache import EmptyLayerSpec, LayerCache, LayerSpec
from baton.models.layers.decoder_layer import Attention
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build, Linear
from baton.models.layers.mamba2 import Mamba2, Mamba2Spec, stored_parts
from baton.models.layers.moe import Experts, Router
from baton.models.layers.row_linear import RowLinear
from baton.models.layers.specs import MoESpec
from baton.models.loading.tensor_names import split_rows

_MAMBA, _ATTENTION, _EXPERTS, _MLP = "M", "*", "E", "-"
_KINDS = {
    **{kind: kind for kind in (_MAMBA, _ATTENTION, _EXPERTS, _MLP)},
    **{"linear_attention": _MAMBA, "mamba": _MAMBA, "full_attention": _ATTENTION, "attention": _ATTENTION},
    **{"moe": _EXPERTS, "mlp": _MLP},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronConfig(ModelConfig):
    """`kinds[l]`: the kinds of layer l's blocks: one in the model, several in an MTP module (`mtp_kinds`). `experts`:
    their inputs and outputs have `expert_size`, below the hidden size if projected (LatentMoE, arXiv:2512.20856).
    """

    kinds: tuple[str, ...]
    mtp_kinds: str
    mamba: Mamba2Spec
    experts: MoESpec
    expert_size: int


class NemotronH(CausalLM):
    """An MTP module, stored under `mtp.`, is not loaded."""

    @classmethod
    def parse_config(cls, raw: RawConfig) -> NemotronConfig:
        kinds = _kinds(raw, "hybrid_override_pattern", "layers_block_type", "layer_types")
        for name, supported in (("mamba_hidden_act", "silu"), ("mamba_ssm_cache_dtype", "float32")):
            require_value(raw, name, supported)
        require_value(raw, "n_shared_experts", 1)
        for name in ("attention_bias", "residual_in_fp32"):
            require_value(raw, name, False)
        if raw.get("sliding_window") is not None:
            raise CheckpointError(f"config.json: sliding_window is {raw['sliding_window']!r}, expected null")
        refuse_limit(raw.get("time_step_limit"))
        eps = raw.get("layer_norm_epsilon", 1e-5)
        sizes = {"num_hidden_layers": len(kinds), "rms_norm_eps": eps}
        ropes = dict.fromkeys(("rope_parameters", "rope_scaling", "partial_rotary_factor"))
        fields = decoder_fields(
            {"intermediate_size": 21504, "num_key_value_heads": 8, **raw, **sizes, **ropes},
            max_position_default=4096,
            head_dim_default=128,
            activation=("mlp_hidden_act", "relu2"),
        )
        size = raw.get("moe_latent_size")
        return NemotronConfig(
            **fields,
            norm_offset=0.0,
            mlp_bias=get_bool(raw, "mlp_bias"),
            kinds=kinds,
            mtp_kinds="".join(_kinds(raw, "mtp_hybrid_override_pattern", "mtp_layers_block_type")),
            mamba=_mamba_spec(raw),
            experts=_experts(raw),
            expert_size=fields["hidden_size"] if size is None else get_int(raw, "moe_latent_size"),
        )

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        nemotron = cast(NemotronConfig, config)
        kind = nemotron.kinds[layer_id]
        if _MAMBA in kind:
            return nemotron.mamba.state_spec
        return super().kv_layer(config, layer_id) if _ATTENTION in kind else EmptyLayerSpec()

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        nemotron = cast(NemotronConfig, config)
        blocks = [NemotronBlock(nemotron, kind, layer_id, build) for kind in nemotron.kinds[layer_id]]
        return blocks[0] if len(blocks) == 1 else NemotronBlocks(blocks)

    def mtp_config(self, num_modules: int) -> ModelConfig:
        config = cast(NemotronConfig, super().mtp_config(num_modules))
        if config.mtp_kinds.count(_ATTENTION) != 1 or _MAMBA in config.mtp_kinds:
            raise CheckpointError(
                f"config.json: mtp_hybrid_override_pattern is {config.mtp_kinds!r}, expected one block of attention, "
                "and others of experts or MLPs"
            )
        return replace(config, kinds=(config.mtp_kinds,) * num_modules)

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        owner, _, kind = name.rpartition(".")
        place, _, layer = owner.rpartition(".")
        parts = stored_parts(cast(NemotronConfig, self.config).mamba).get(layer)
        if parts is None or not place.endswith(".mixer"):
            yield name, tensor
            return
        for part, values in split_rows(name, tensor, parts):
            yield f"{owner}.{part}.{kind}", values


class NemotronBlock(nn.Module):
    """x + mixer(norm(x)): [T, E] -> [T, E]."""

    def __init__(self, config: NemotronConfig, kind: str, layer_id: int, build: Build) -> None:
        super().__init__()
        size = config.hidden_size
        self._kind = kind
        self.norm = make_norm(config, size, build)
        self.mixer: nn.Module
        if kind == _MAMBA:
            self.mixer = Mamba2(config.mamba, size, config.rms_eps, layer_id, build)
        elif kind == _ATTENTION:
            self.mixer = Attention(config, layer_id, build)
        elif kind == _EXPERTS:
            self.mixer = LatentMoE(config, build)
        else:
            self.mixer = SquaredMLP(size, config.intermediate_size, config.mlp_bias, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        normed = self.norm(x)
        if self._kind == _MAMBA:
            return x + self.mixer(normed, cache)  # type: ignore[no-any-return]
        if self._kind == _ATTENTION:
            return x + self.mixer(normed, None, cache)  # type: ignore[no-any-return]
        return x + self.mixer(normed)  # type: ignore[no-any-return]


class NemotronBlocks(nn.ModuleList):
    """Several blocks, in order: [T, E] -> [T, E]."""

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        for block in self:
            x = block(x, cos_sin, cache)
        return x


class SquaredMLP(nn.Module):
    """down(relu(up(x))^2): [T, E] -> [T, E] (arXiv:2109.08668)."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, build: Build) -> None:
        super().__init__()
        share = build.ranks.share(intermediate, "inner numbers of an MLP")
        self.up_proj = Linear(hidden, share.length, build, bias, share)
        self.down_proj = RowLinear(share, hidden, build, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())  # type: ignore[no-any-return]

    def partials(self, x: Tensor) -> list[Tensor]:
        return self.down_proj.partials(F.relu(self.up_proj(x)).square())


class LatentMoE(nn.Module):
    """Routed experts, perhaps on projected rows, and a shared one: [T, E] -> [T, E]."""

    def __init__(self, config: NemotronConfig, build: Build) -> None:
        super().__init__()
        spec, hidden, size = config.experts, config.hidden_size, config.expert_size
        self.gate = Router(spec, hidden, build)
        is_projected = size != hidden
        self.fc1_latent_proj = Linear(hidden, size, build, config.mlp_bias) if is_projected else None
        self.experts = Experts(
            lambda: SquaredMLP(size, spec.intermediate_size, False, build), spec.num_experts, size, build
        )
        self.fc2_latent_proj = Linear(size, hidden, build, config.mlp_bias) if is_projected else None
        self.shared_experts = SquaredMLP(hidden, spec.shared_size, config.mlp_bias, build)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        out = self.experts.weighted_sum(rows, *self.gate.choose(x))
        out = out if self.fc2_latent_proj is None else self.fc2_latent_proj(out)
        return out + self.shared_experts(x)  # type: ignore[no-any-return]


def _kinds(raw: RawConfig, pattern: str, *lists: str) -> tuple[str, ...]:
    """From a string with a character each, or a list of names."""
    name = next((name for name in (*lists, pattern) if raw.get(name) is not None), None)
    if name is None:
        return (_ATTENTION, _EXPERTS) if pattern.startswith("mtp") else (_MAMBA, _EXPERTS, _ATTENTION, _MLP)
    kinds = raw[name]
    known = isinstance(kinds, list | str) and all(isinstance(kind, str) and kind in _KINDS for kind in kinds)
    if not known or not kinds:
        raise CheckpointError(f"config.json: {name} is {kinds!r}, expected blocks of {', '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in kinds)


def _mamba_spec(raw: RawConfig) -> Mamba2Spec:
    raw = {**raw, **{new: raw[old] for old, new in _OLD_NAMES.items() if old in raw}}
    num_heads, num_groups = get_int(raw, "mamba_num_heads", 128), get_int(raw, "n_groups", 8)
    if num_heads % num_groups:
        raise CheckpointError(f"config.json: mamba_num_heads {num_heads} is no multiple of n_groups {num_groups}")
    return Mamba2Spec(
        num_heads,
        get_int(raw, "mamba_head_dim", 64),
        num_groups,
        get_int(raw, "ssm_state_size", 128),
        get_int(raw, "conv_kernel", 4, minimum=2),
        get_bool(raw, "use_conv_bias", True),
        get_bool(raw, "use_bias"),
    )


_OLD_NAMES = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}


def _experts(raw: RawConfig) -> MoESpec:
    return MoESpec(
        layers=(),
        num_experts=get_int(raw, "n_routed_experts", 8),
        top_k=get_int(raw, "num_experts_per_tok", 2),
        intermediate_size=get_int(raw, "moe_intermediate_size", 7688),
        scores="sigmoid",
        renormalise=get_bool(raw, "norm_topk_prob", True),
        scale=get_float(raw, "routed_scaling_factor", 1.0),
        has_choice_bias=True,
        num_groups=get_int(raw, "n_group", 1),
        top_groups=get_int(raw, "topk_group", 1),
        group_score="two_best",
        shared_size=get_int(raw, "moe_shared_expert_intermediate_size", 7688),
    )

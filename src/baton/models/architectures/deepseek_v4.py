"""DeepSeek-V4 (`model_type` deepseek_v4; DeepSeek, 2026): windows and compressed entries instead of a KV cache of all
tokens, hyper-connections instead of one residual, and experts chosen by token id in the first layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.base import CausalLM, Decoder
from baton.models.config import (
    ModelConfig,
    RawConfig,
    RopeSpec,
    decoder_fields,
    get_float,
    get_int,
    read_rope,
    rope_section,
)
from baton.models.families.compressed import CompressedSpec
from baton.models.families.deepseek import require_value
from baton.models.families.deepseek_v4 import V4Config, V4Layer
from baton.models.families.hyper_connections import StreamHead, StreamSpec
from baton.models.layer_cache import LayerSpec
from baton.models.layers.linear import Build
from baton.models.layers.specs import IndexSpec, MoESpec

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
}
_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SLIDING: 0, _SPARSE: 4, _HEAVY: 128}
_HASHED, _ROUTED = "hash_moe", "moe"


class V4Decoder(Decoder):
    """The residual is the streams side by side; all begin as the embedding. Drafters get their mean, as in SGLang."""

    def __init__(self, config: ModelConfig, layers: Mapping[int, nn.Module], build: Build) -> None:
        super().__init__(config, layers, build)
        self._v4 = cast(V4Config, config)
        if build.ranks.stage.index == 0:
            self.hc_head = StreamHead(self._v4.streams, config.hidden_size, build)
        for layer_id, layer in layers.items():
            cast(V4Layer, layer).self_attn.rotary = self.rotaries[self._rotary_of[layer_id]]

    @property
    def stream_size(self) -> int:
        return self._v4.streams.count * self._v4.hidden_size

    def spread(self, embeds_TE: Tensor) -> Tensor:
        return embeds_TE.repeat(1, self._v4.streams.count)

    def collapse(self, x: Tensor) -> Tensor:
        return self.hc_head(x)  # type: ignore[no-any-return]

    def feature(self, x: Tensor) -> Tensor:
        return x.view(len(x), self._v4.streams.count, -1).float().mean(dim=1).to(x.dtype)

    def layer_inputs(self, input_ids_T: Tensor, embeds_TE: Tensor) -> Mapping[int, tuple[Tensor, ...]]:
        return {layer: (input_ids_T,) for layer, is_hashed in enumerate(self._v4.is_hashed) if is_hashed}


class DeepseekV4(CausalLM):
    decoder = V4Decoder
    own_parts = ("model.hc_head.",)

    @classmethod
    def parse_config(cls, raw: RawConfig) -> V4Config:
        return _parse(raw)

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        return cast(V4Config, config).attention[layer_id].kept

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return V4Layer(cast(V4Config, config), layer_id, build)

    def mtp_config(self, num_modules: int) -> ModelConfig:
        """MTP modules have only a window, and routed experts."""
        config = cast(V4Config, self.config)
        plain = replace(config.attention[0], rate=0, overlaps=False, index=None)
        attention, ropes = (plain,) * num_modules, (config.rope,) * num_modules
        wide = replace(config, attention=attention, is_hashed=(False,) * num_modules, layer_ropes=ropes)
        assert config.moe is not None
        moe = replace(config.moe, layers=(True,) * num_modules)
        return replace(wide, num_layers=num_modules, windows=config.windows[:1] * num_modules, moe=moe)

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name.endswith(".tid2eid"):
            moe = self.config.moe
            assert moe is not None
            known = tensor.numel() and not tensor.is_meta
            if known and not 0 <= int(tensor.min()) <= int(tensor.max()) < moe.num_experts:
                raise CheckpointError(f"tensor {name} names experts outside 0 to {moe.num_experts - 1}")
        return ((name, tensor),)


def _parse(raw: RawConfig) -> V4Config:
    raw = {**_DEFAULTS, **raw}
    for name, value in (("num_key_value_heads", 1), ("scoring_func", "sqrtsoftplus"), ("norm_topk_prob", True)):
        require_value(raw, name, value)
    for name in ("attention_bias", "mlp_bias"):
        require_value(raw, name, False)
    ropes = dict.fromkeys(("rope_parameters", "rope_scaling", "partial_rotary_factor"))
    fields = decoder_fields({**raw, **ropes, "intermediate_size": raw["moe_intermediate_size"]}, 1 << 20)
    layers, rotary_dim = fields["num_layers"], _rotary_dim(raw, fields["head_dim"])
    kinds, max_position = _kinds(raw, layers), fields["max_position"]
    local, far = _ropes(raw, max_position, fields["head_dim"], rotary_dim)
    window = get_int(raw, "sliding_window", 128)
    inner = get_int(raw, "moe_intermediate_size")
    return V4Config(
        **{**fields, "windows": (window,) * layers, "rope": local, "rotary_dim": rotary_dim},
        layer_ropes=tuple(local if kind == _SLIDING else far for kind in kinds),
        norm_offset=0.0,
        has_sinks=True,
        moe=MoESpec(
            layers=(True,) * layers,
            num_experts=get_int(raw, "n_routed_experts", get_int(raw, "num_local_experts", 256)),
            top_k=get_int(raw, "num_experts_per_tok", 6),
            intermediate_size=inner,
            scores="sqrtsoftplus",
            renormalise=True,
            scale=get_float(raw, "routed_scaling_factor", 1.5),
            has_choice_bias=True,
            shared_size=inner * get_int(raw, "n_shared_experts", 1, minimum=0),
        ),
        attention=_attention_specs(raw, kinds, fields["head_dim"], fields["num_heads"], window, rotary_dim),
        is_hashed=_hashed(raw, layers),
        streams=StreamSpec(
            get_int(raw, "hc_mult", 4),
            get_int(raw, "hc_sinkhorn_iters", 20),
            get_float(raw, "hc_eps", 1e-6),
            fields["rms_eps"],
        ),
        limit=get_float(raw, "swiglu_limit", 10.0),
    )


def _rotary_dim(raw: RawConfig, head_dim: int) -> int:
    if raw.get("partial_rotary_factor") is None:
        dim = get_int(raw, "qk_rope_head_dim", max(2, head_dim // 8))
    else:
        dim = int(head_dim * min(get_float(raw, "partial_rotary_factor"), 2.0))
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(f"config.json: qk_rope_head_dim is {dim}, expected an even number up to {head_dim}")
    return dim


def _kinds(raw: RawConfig, num_layers: int) -> list[str]:
    """Each layer's attention, by `layer_types` or `compress_ratios` (0, 4 or 128), else as in V4-Pro. Raises
    `CheckpointError`.
    """
    kinds, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    if kinds is None and ratios is None:
        kinds = [_HEAVY] * 2 + [_SPARSE if i % 2 else _HEAVY for i in range(num_layers - 2)]
    elif kinds is None and isinstance(ratios, list):
        names = {rate: kind for kind, rate in _RATES.items()}
        kinds = [names.get(ratio) if isinstance(ratio, int) else None for ratio in ratios]
    known = (*_RATES,)
    # Ratios of MTP modules may follow.
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(kind not in known for kind in kinds):
        given = ratios if raw.get("layer_types") is None else raw["layer_types"]
        raise CheckpointError(f"config.json: layer_types must be {num_layers} of {', '.join(known)}, got {given!r}")
    return kinds[:num_layers]


def _hashed(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return tuple(layer < get_int(raw, "num_hash_layers", 3, minimum=0) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in (_HASHED, _ROUTED) for k in kinds):
        raise CheckpointError(
            f"config.json: mlp_layer_types must be {num_layers} of {_HASHED} or {_ROUTED}, got {kinds!r}"
        )
    return tuple(kind == _HASHED for kind in kinds)


def _ropes(raw: RawConfig, max_position: int, head_dim: int, rotary_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Rotary embeddings of layers with only a window, and of others. YaRN does not scale cos and sin, as published."""
    given = rope_section(raw)
    local, far = given.get("main"), given.get("compress")
    if not isinstance(local, Mapping) or not isinstance(far, Mapping):
        local = {"rope_theta": get_float(raw, "rope_theta", 1e4)}
        far = {**given, "rope_theta": get_float(raw, "compress_rope_theta", 1.6e5)}
        if far.get("rope_type", far.get("type")) == "yarn":
            far.setdefault("attention_factor", 1.0)
    for section in (local, far):
        own = section.get("partial_rotary_factor")
        if own is not None and int(head_dim * get_float(section, "partial_rotary_factor")) != rotary_dim:
            what = f"partial_rotary_factor of rope_parameters is {own!r}, which does not rotate {rotary_dim} dimensions"
            raise CheckpointError(f"config.json: {what} of {head_dim}")
    return read_rope(local, {}, max_position), read_rope(far, {}, max_position)


def _attention_specs(
    raw: RawConfig, kinds: list[str], head_dim: int, num_heads: int, window: int, rotary_dim: int
) -> tuple[CompressedSpec, ...]:
    rates = raw.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise CheckpointError(f"config.json: compress_rates is {rates!r}, expected an object")
    groups = get_int(raw, "o_groups", 8)
    if num_heads % groups:
        raise CheckpointError(f"config.json: o_groups {groups} does not divide num_attention_heads {num_heads}")
    plain = CompressedSpec(
        head_dim, window, get_int(raw, "q_lora_rank", 1024), groups, get_int(raw, "o_lora_rank", 1024)
    )
    old = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
    specs = {_SLIDING: plain}
    for kind, name in old.items():
        rate = get_int(raw, name, get_int(rates, kind, _RATES[kind]), minimum=2)
        specs[kind] = replace(plain, rate=rate, overlaps=kind == _SPARSE)
    if _SPARSE in kinds:
        size = get_int(raw, "index_head_dim", 128, minimum=rotary_dim)
        index = IndexSpec(get_int(raw, "index_n_heads", 64), size, get_int(raw, "index_topk", 512), True, ())
        specs[_SPARSE] = replace(specs[_SPARSE], index=index)
    return tuple(specs[kind] for kind in kinds)

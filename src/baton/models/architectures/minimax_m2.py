"""MiniMax-M2 (`model_type` minimax_m2): queries and keys normed over all heads at once, partly rotated; experts with
sigmoid scores in every layer. MTP modules are not loaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.models.architectures.mixtral import Mixtral
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, get_int, rope_section
from baton.models.families.deepseek import require_value
from baton.models.layers.decoder_layer import Attention, DecoderLayer
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward
from baton.models.layers.parallel import Share
from baton.models.layers.specs import MoESpec

_DEFAULTS = {"num_experts_per_tok": 8, "num_key_value_heads": 8, "num_local_experts": 256, "rope_theta": 5e6}


class MiniMaxM2(Mixtral):
    """Experts are stored as Mixtral's."""

    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        raw = {**_DEFAULTS, **raw}
        for name, supported in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer"), ("use_qk_norm", True)):
            require_value(raw, name, supported)
        require_value(raw, "shared_intermediate_size", 0)
        kinds = raw.get("attn_type_list") or []
        if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
            raise CheckpointError("config.json: attn_type_list must be all 1: linear attention is not supported")
        if raw.get("sliding_window") is not None:
            raise CheckpointError(f"config.json: sliding_window is {raw['sliding_window']!r}, expected null")
        # Published configs have the number of rotated dimensions.
        if raw.get("rotary_dim") is not None and "partial_rotary_factor" not in {**rope_section(raw), **raw}:
            raw["partial_rotary_factor"] = get_int(raw, "rotary_dim") / get_int(raw, "head_dim", 128)
        fields = decoder_fields(raw, max_position_default=196608, head_dim_default=128, partial_rotary_default=1.0)
        moe = MoESpec(
            layers=(True,) * fields["num_layers"],
            num_experts=get_int(raw, "num_local_experts"),
            top_k=get_int(raw, "num_experts_per_tok"),
            intermediate_size=fields["intermediate_size"],
            scores="sigmoid",
            renormalise=True,
            has_choice_bias=get_bool(raw, "use_routing_bias", True),
        )
        return ModelConfig(**fields, moe=moe)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        attention = MiniMaxAttention(config, layer_id, build)
        return DecoderLayer(config, layer_id, build, attention=attention, mlp=feed_forward(config, layer_id, build))

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        name = name.replace(".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")
        return super().unpack(name, tensor)


class MiniMaxAttention(Attention):
    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__(config, layer_id, build)
        heads = build.ranks.share(config.num_heads, "attention heads")
        self.q_norm = HeadsNorm(heads, config.head_dim, config.rms_eps, build)
        self.k_norm = HeadsNorm(build.ranks.kv_heads(config.num_kv_heads), config.head_dim, config.rms_eps, build)


class HeadsNorm(RMSNorm):
    """RMSNorm over all of a row's heads together, including other ranks': [T, H, D] -> [T, H, D] of this rank's."""

    def __init__(self, heads: Share, head_dim: int, eps: float, build: Build) -> None:
        super().__init__(heads.length * head_dim, eps, build)
        self.cuts = {"weight": (0, heads.times(head_dim))}
        self._ranks, self._size = build.ranks, heads.total * head_dim
        # Adjacent ranks that hold the same head.
        self._copies = max(1, build.ranks.size // heads.total)

    def forward(self, x: Tensor) -> Tensor:
        if self._ranks.num_slices == 1:
            return super().forward(x.flatten(1)).view(x.shape)
        wide = x.float()
        parts = self._ranks.gather(_total(wide.square()))
        total = _total(torch.cat(tuple(parts[:: self._copies]), dim=1))
        factor = 1.0 / torch.sqrt(total / self._size + self._eps)
        return self.weight.view(x.shape[1:]) * (wide * factor[:, None, None]).to(x.dtype)


def _total(values: Tensor) -> Tensor:
    """Sums over the last dimension, by halves: the order of PyTorch's sums may depend on the number of rows."""
    while (width := values.shape[-1]) > 1:
        half = width // 2
        pairs = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat((pairs, values[..., 2 * half :]), dim=-1)
    return values[..., 0]

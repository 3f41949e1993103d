"""Mixtral (`model_type` mixtral; arXiv:2401.04088): Mistral's attention, experts in every layer, the weights of the
chosen ones renormalised."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_int
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward
from baton.models.layers.specs import MoESpec

_LAYERS = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


class Mixtral(CausalLM):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        raw = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, **raw}
        fields = decoder_fields(raw, max_position_default=4096 * 32)
        if raw.get("sliding_window") is not None:
            fields["windows"] = (get_int(raw, "sliding_window"),) * fields["num_layers"]
        moe = MoESpec(
            layers=(True,) * fields["num_layers"],
            num_experts=get_int(raw, "num_local_experts", 8),
            top_k=get_int(raw, "num_experts_per_tok", 2),
            intermediate_size=fields["intermediate_size"],
            renormalise=True,
        )
        return ModelConfig(**fields, moe=moe)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return DecoderLayer(config, layer_id, build, mlp=feed_forward(config, layer_id, build))

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return ((rename_expert(name), tensor),)


def rename_expert(name: str) -> str:
    """The usual name of a tensor named like Mixtral's experts."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for stored, layer in _LAYERS.items():
        name = name.replace(stored, layer)
    return name

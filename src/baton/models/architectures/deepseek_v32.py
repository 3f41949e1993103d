"""DeepSeek-V3.2 (`model_type` deepseek_v32) and GLM-5 (glm_moe_dsa): DeepSeek-V3 with attention to chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from baton.errors import CheckpointError
from baton.models.config import ModelConfig, RawConfig, get_int
from baton.models.families.deepseek import Deepseek, expert_layers, latent_fields, sigmoid_experts
from baton.models.layer_cache import LatentLayerSpec, LayerSpec
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build
from baton.models.layers.moe import feed_forward
from baton.models.layers.sparse_latent import SparseLatentAttention
from baton.models.layers.specs import IndexSpec

_V32: Mapping[str, Any] = {
    "first_k_dense_replace": 3,
    "index_n_heads": 64,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
_GLM: Mapping[str, Any] = {
    **_V32,
    "index_n_heads": 32,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "v_head_dim": 256,
}
_MLP_KINDS = ("dense", "sparse")
_KINDS = {"F": False, "full": False, "S": True, "shared": True}


class DeepseekV32(Deepseek):
    """Keys of the indexer lie beside the latents, in layers that do not share a choice."""

    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        return _parse({**_V32, **raw}, indexer_interleaved=False)

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        latent = config.latent
        assert latent is not None
        assert latent.index is not None
        index_dim = 0 if latent.index.is_shared[layer_id] else latent.index.head_dim
        return LatentLayerSpec(latent.latent_dim, latent.rope_dim, index_dim)

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        attention = SparseLatentAttention(config, layer_id, build)
        return DecoderLayer(config, layer_id, build, attention=attention, mlp=feed_forward(config, layer_id, build))

    def mtp_config(self, num_modules: int) -> ModelConfig:
        """Each module has its own indexer."""
        config = super().mtp_config(num_modules)
        assert config.latent is not None
        assert config.latent.index is not None
        index = replace(config.latent.index, is_shared=(False,) * num_modules)
        return replace(config, latent=replace(config.latent, index=index))


class GlmMoeDsa(DeepseekV32):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        return _parse({**_GLM, **raw}, indexer_interleaved=True)


def _parse(raw: RawConfig, indexer_interleaved: bool) -> ModelConfig:
    fields = latent_fields(raw, max_position_default=4096, interleaved=True)
    num_layers, latent = fields["num_layers"], fields["latent"]
    if latent.query_rank is None:
        raise CheckpointError("config.json: q_lora_rank is null, and the indexer needs it")
    index = IndexSpec(
        num_heads=get_int(raw, "index_n_heads"),
        head_dim=get_int(raw, "index_head_dim", 128, minimum=latent.rope_dim),
        top_k=get_int(raw, "index_topk", 2048),
        is_interleaved=indexer_interleaved,
        is_shared=_shared_layers(raw, num_layers) if indexer_interleaved else (False,) * num_layers,
    )
    moe = replace(sigmoid_experts(raw, num_layers), layers=expert_kinds(raw, num_layers))
    return ModelConfig(**{**fields, "latent": replace(latent, index=index)}, moe=moe)


def expert_kinds(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """Layers with experts, by `mlp_layer_types` or as in DeepSeek-V3."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return expert_layers(raw, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _MLP_KINDS for kind in kinds):
        known = " or ".join(_MLP_KINDS)
        raise CheckpointError(f"config.json: mlp_layer_types must be {num_layers} of {known}, got {kinds!r}")
    return tuple(kind == "sparse" for kind in kinds)


def _shared_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """Layers that use an earlier layer's choice: by `indexer_types` or `index_topk_pattern` ("FSSF"); else every
    `index_topk_freq`th layer has an indexer, from `index_skip_topk_offset` - 1 on.
    """
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        every, offset = get_int(raw, "index_topk_freq", 1), get_int(raw, "index_skip_topk_offset", 2, minimum=0)
        return tuple(max(layer - offset + 1, 0) % every != 0 for layer in range(num_layers))
    known = isinstance(kinds, list | str) and all(isinstance(kind, str) and kind in _KINDS for kind in kinds)
    if not known or len(kinds) != num_layers or _KINDS[kinds[0]]:
        raise CheckpointError(
            f"config.json: indexer_types must be {num_layers} of full or shared, the first of them full, got {kinds!r}"
        )
    return tuple(_KINDS[kind] for kind in kinds)

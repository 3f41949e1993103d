"""gpt-oss (`model_type` gpt_oss; arXiv:2508.10925): alternating windowed and full layers, attention sinks, experts.

Checkpoints stack a layer's experts in one tensor, in MXFP4 or plain. Shapes: T rows, E hidden size, X experts, K
experts chosen for a row, I an expert's inner width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton.errors import CheckpointError
from baton.kernels.cpu.elementwise import clamped_glu
from baton.kernels.cpu.scalar import supports
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields, get_bool, get_float, get_int, sliding_layers
from baton.models.layers import moe
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build, Linear
from baton.models.layers.mxfp4 import BLOCKS, SCALES, Mxfp4Pairs, dequantise_mxfp4
from baton.models.layers.row_linear import RowLinear
from baton.models.layers.specs import MoESpec

_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 36,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_BIAS = "_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """`alpha` and `limit`: constants of the experts' clamped gates."""

    alpha: float
    limit: float


class GptOss(CausalLM):
    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self._pairs = Mxfp4Pairs()

    @classmethod
    def parse_config(cls, raw: RawConfig) -> GptOssConfig:
        raw = {**_DEFAULTS, "rope_theta": 150000.0, **raw}
        if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
            raw["rope_parameters"] = _ROPE
        _expect_mxfp4(raw.pop("quantization_config", None))
        fields = decoder_fields(raw, max_position_default=131072, head_dim_default=64)
        layers = fields["num_layers"]
        types = raw.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
        slides = sliding_layers(types, layers)
        # Null is refused: windowed layers need a window.
        window = get_int({"sliding_window": 128, **raw}, "sliding_window") if any(slides) else None
        top_k = get_int(raw, "num_experts_per_tok", 4)
        if get_int(raw, "experts_per_token", top_k) != top_k:
            raise CheckpointError(f"config.json: experts_per_token is not num_experts_per_tok {top_k}")
        experts = get_int(raw, "num_local_experts", 128)
        bias = get_bool(raw, "attention_bias", True)
        return GptOssConfig(
            **{**fields, "windows": tuple(window if slide else None for slide in slides)},
            qkv_bias=bias,
            o_bias=bias,
            has_sinks=True,
            norm_offset=0.0,
            moe=MoESpec((True,) * layers, experts, top_k, fields["intermediate_size"]),
            alpha=get_float(raw, "swiglu_alpha", 1.702),
            limit=get_float(raw, "swiglu_limit", 7.0),
        )

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return DecoderLayer(config, layer_id, build, mlp=RoutedExperts(cast(GptOssConfig, config), build))

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Plain weights are [X, in, out], MXFP4 blocks [X, out, in / 32, 16]."""
        if not self._is_stacked(name, tensor):
            yield name, tensor
        elif not name.endswith((BLOCKS, SCALES)):
            for expert, part in enumerate(tensor):
                yield _of_expert(name, expert), part if name.endswith(_BIAS) else part.T
        elif (pair := self._pairs.add(name, tensor)) is not None:
            stem, blocks, scales = pair
            for expert in range(len(blocks)):
                yield _of_expert(stem, expert), dequantise_mxfp4(blocks[expert], scales[expert])

    def _is_stacked(self, name: str, tensor: Tensor) -> bool:
        if ".mlp.experts." not in name:
            return False
        assert self.config.moe is not None
        num_dims = {_BIAS: 2, BLOCKS: 4}.get("_" + name.rpartition("_")[2], 3)
        if tensor.dim() != num_dims or len(tensor) != self.config.moe.num_experts:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, expected {num_dims} dimensions, the first of "
                f"{self.config.moe.num_experts} experts"
            )
        return True


def _of_expert(name: str, expert: int) -> str:
    """Expert 3: ...down_proj -> ...3.down_proj.weight, ...down_proj_bias -> ...3.down_proj.bias."""
    owner, _, kind = name.rpartition(".")
    part = f"{kind.removesuffix(_BIAS)}.bias" if kind.endswith(_BIAS) else f"{kind}.weight"
    return f"{owner}.{expert}.{part}"


def _expect_mxfp4(quantization: object) -> None:
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method not in (None, "mxfp4"):
        raise CheckpointError(f"config.json: quantization_config is set ({method!r}), only 'mxfp4' is supported")


class RoutedExperts(nn.Module):
    """A router and its experts, [T, E] -> [T, E]."""

    def __init__(self, config: GptOssConfig, build: Build) -> None:
        super().__init__()
        assert config.moe is not None
        self.router = LogitRouter(config.moe, config.hidden_size, build)
        num, hidden = config.moe.num_experts, config.hidden_size
        self.experts = moe.Experts(lambda: Expert(config, build), num, hidden, build)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts.weighted_sum(x, *self.router.choose(x))


class LogitRouter(Linear):
    """The K experts with the largest logits, weighted by a softmax over these, in float32."""

    def __init__(self, spec: MoESpec, hidden: int, build: Build) -> None:
        super().__init__(hidden, spec.num_experts, replace(build, dtype=torch.float32), bias=True)
        self._top_k = spec.top_k

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(x.float())
        ids = logits.topk(self._top_k, dim=-1).indices.sort(dim=-1).values
        return ids, logits.gather(1, ids).softmax(dim=-1)


class Expert(nn.Module):
    """down((up + 1) gate sigmoid(alpha gate)) of clamped, interleaved gates and ups: [T, E] -> [T, E]."""

    def __init__(self, config: GptOssConfig, build: Build) -> None:
        super().__init__()
        self._alpha, self._limit = config.alpha, config.limit
        share = build.ranks.share(config.intermediate_size, "inner numbers of an expert")
        # Gates and ups alternate: a rank's share is one range of outputs.
        self.gate_up_proj = Linear(config.hidden_size, 2 * share.length, build, bias=True, share=share.times(2))
        self.down_proj = RowLinear(share, config.hidden_size, build, bias=True)
        self._has_bias = build.ranks.rank == 0
        self._on_cpu = supports(build.device, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._gated(x))  # type: ignore[no-any-return]

    def partials(self, x: Tensor) -> list[Tensor]:
        """Only rank 0's first one includes the bias, so that it counts once per expert, with the expert's weight."""
        parts = self.down_proj.partials(self._gated(x))
        if self._has_bias:
            assert self.down_proj.bias is not None
            parts[0] = parts[0] + self.down_proj.bias
        return parts

    def _gated(self, x: Tensor) -> Tensor:
        gate_up: Tensor = self.gate_up_proj(x)
        if self._on_cpu:
            return clamped_glu(gate_up, self._alpha, self._limit)
        gate, up = gate_up[:, ::2].clamp(max=self._limit), gate_up[:, 1::2].clamp(-self._limit, self._limit)
        return (up + 1) * gate * torch.sigmoid(self._alpha * gate)

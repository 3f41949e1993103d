"""Qwen3-Next (`model_type` qwen3_next): Qwen3.5's layers, with projections stored in groups by key head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from baton.errors import CheckpointError
from baton.models.architectures.qwen3_moe import moe_layers
from baton.models.config import RawConfig
from baton.models.families.qwen_hybrid import QwenHybrid, QwenHybridConfig, hybrid_fields, qwen_experts

_DEFAULTS = {"intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10, "num_key_value_heads": 2}


class Qwen3Next(QwenHybrid):
    @classmethod
    def parse_config(cls, raw: RawConfig) -> QwenHybridConfig:
        raw = {**_DEFAULTS, **raw}
        fields = hybrid_fields(raw)
        layers = moe_layers(raw, fields["num_layers"]) if raw["num_experts"] else ()
        return QwenHybridConfig(**fields, moe=qwen_experts(raw, layers) if any(layers) else None)

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """As in Qwen3.5. For each key head, `in_proj_qkvz` has its q, k, and v and z of its value heads, `in_proj_ba`
        their b and a."""
        delta = cast(QwenHybridConfig, self.config).delta
        owner, _, kind = name.rpartition(".")
        place, _, layer = owner.rpartition(".")
        each = delta.value_heads // delta.key_heads
        values = each * delta.value_dim
        groups = {
            "in_proj_qkvz": {"q": delta.key_dim, "k": delta.key_dim, "v": values, "z": values},
            "in_proj_ba": {"b": each, "a": each},
        }
        if layer not in groups:
            yield from super().unpack(name, tensor)
            return
        parts = groups[layer]
        if tensor.dim() != 2 or len(tensor) != delta.key_heads * sum(parts.values()):
            rows = delta.key_heads * sum(parts.values())
            raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, expected {rows} rows")
        by_head = torch.split(tensor.view(delta.key_heads, -1, tensor.shape[1]), list(parts.values()), dim=1)
        for part, rows_of in zip(parts, by_head, strict=True):
            yield f"{place}.in_proj_{part}.{kind}", rows_of.flatten(0, 1)

"""A target's own multi-token prediction module (DeepSeek-V3, arXiv:2412.19437, 2.2; GLM-4.5 has the same).

Row i takes the target's final-norm state of position i and x_{i+1}: eh_proj(enorm(embedding), hnorm(state)), one layer
of the target's own kind, a norm. Its output is both what the target's LM head reads and, for drafts behind the first,
the state of the next row: one module is used over and over, as vLLM does (transformers stops at one draft).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from baton.drafters.head import HeadDrafter
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.cache import LayerCache
from baton.models.config import ModelConfig, RawConfig, get_bool
from baton.models.layers import RMSNorm
from baton.models.linear import Build, Linear
from baton.models.loader import fill, read_config

# Targets whose checkpoints keep their modules in this shape, behind their last layer.
_TYPES = ("deepseek_v3", "glm4_moe")
# The module's own parts; everything else is its layer's.
_PARTS = ("enorm.", "hnorm.", "eh_proj.")
# Copies of the target's.
_SHARED = ("embed_tokens.", "shared_head.head.")


class Mtp(HeadDrafter):
    """See the module's docstring. Embedding and LM head are the target's."""

    aux_layers = ()

    def __init__(self, target: CausalLM, build: Build) -> None:
        config = _module_config(target.config)
        super().__init__(config, [target.kv_layer(config, 0)], target, set(), build)
        hidden = self.feature_size = config.hidden_size
        self.enorm = RMSNorm(hidden, config.rms_eps, build)
        self.hnorm = RMSNorm(hidden, config.rms_eps, build)
        self.eh_proj = Linear(2 * hidden, hidden, build)
        self.layer = target.layer(config, 0, build)
        self.norm = RMSNorm(hidden, config.rms_eps, build)

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> Mtp:
        """Build and fill the module that the checkpoint directory `path` of the target holds. Raises `CheckpointError`
        where it holds none, or several."""
        _check(read_config(path))
        drafter = cls(target, build)
        prefix = f"model.layers.{target.config.num_layers}."

        def rename(name: str) -> str | None:
            if not name.startswith(prefix):
                return None
            name = name.removeprefix(prefix)
            if name.startswith(_SHARED) or name.endswith("rotary_emb.inv_freq"):
                return None
            if name.startswith("shared_head."):
                return name.removeprefix("shared_head.")
            return name if name.startswith(_PARTS) else f"layer.{name}"

        fill(drafter, path, rename)
        return drafter.eval()

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Tensor:
        return hidden_TE

    def forward(
        self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, attend: LayerCache, first: bool
    ) -> tuple[Tensor, Tensor]:
        x = self.eh_proj(torch.cat((self.enorm(self._embed(next_ids_T)), self.hnorm(features_TF)), dim=-1))
        x = self.norm(self.layer(x, self.rotary.at(positions_T), attend))
        return x, x


def _module_config(config: ModelConfig) -> ModelConfig:
    """The target's, of its last layer alone; of a target with experts, a layer with experts."""
    moe = config.moe and dataclasses.replace(config.moe, layers=(True,))
    last = config.windows[-1:]
    return dataclasses.replace(config, num_layers=1, windows=last, layer_ropes=config.layer_ropes[-1:], moe=moe)


def _check(raw: RawConfig) -> None:
    if raw.get("model_type") not in _TYPES:
        known = ", ".join(_TYPES)
        raise CheckpointError(f"drafter: mtp is for targets of type {known}, this is {raw.get('model_type')!r}")
    # Hugging Face reads the second name too.
    num = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 1))
    if num != 1:
        raise CheckpointError(f"drafter: config.json: num_nextn_predict_layers is {num!r}, only 1 is supported")
    if get_bool(raw, "mtp_hidden_states_first"):
        raise CheckpointError("drafter: config.json: mtp_hidden_states_first is not supported")

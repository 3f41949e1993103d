"""A target's own multi-token prediction modules (DeepSeek-V3, arXiv:2412.19437, 2.2; GLM-4.5 has the same).

Row i of module j (from 1) takes a state of position i and x_{i+j}: eh_proj(enorm(embedding), hnorm(state)), one layer
of the target's kind, and a norm. The state is the target's final-norm state for the first module, and the output of
module j - 1 for the others. The target's LM head reads the output.

After the last module, the last module runs again on its own output, as in vLLM with one module (transformers stops at
one draft per module).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from baton.drafters.head import HeadDrafter
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.cache import LayerCache
from baton.models.config import ModelConfig, RawConfig, get_bool
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build, Linear
from baton.models.loading.loader import fill
from baton.models.loading.stored import read_config

# Targets whose checkpoints store their modules this way, after the last layer.
_TYPES = ("deepseek_v3", "glm4_moe")
# A module's own tensors; all others belong to its layer.
_PARTS = ("enorm.", "hnorm.", "eh_proj.")
# Copies of the target's tensors.
_SHARED = ("embed_tokens.", "shared_head.head.")
MAX_MODULES = 16


class Module(nn.Module):
    """One module: from embeddings and states [T, E] to states [T, E]."""

    def __init__(self, target: CausalLM, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = RMSNorm(hidden, config.rms_eps, build)
        self.hnorm = RMSNorm(hidden, config.rms_eps, build)
        self.eh_proj = Linear(2 * hidden, hidden, build)
        self.layer = target.layer(config, layer_id, build)
        self.norm = RMSNorm(hidden, config.rms_eps, build)

    def forward(self, embeds: Tensor, states: Tensor, cos_sin: tuple[Tensor, Tensor], attend: LayerCache) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(states)), dim=-1))
        return self.norm(self.layer(x, cos_sin, attend))  # type: ignore[no-any-return]


class Mtp(HeadDrafter):
    """One module. Embedding and LM head are the target's."""

    aux_layers = ()

    def __init__(self, target: CausalLM, build: Build, num_modules: int = 1) -> None:
        config = _modules_config(target.config, num_modules)
        super().__init__(config, [target.kv_layer(config, i) for i in range(num_modules)], target, set(), build)
        self.kv_modules = list(range(1, num_modules + 1))
        self.feature_size = config.hidden_size
        self.layers = nn.ModuleList(Module(target, config, i, build) for i in range(num_modules))

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> Mtp:
        """Build and fill the modules from the target's checkpoint directory `path`. Raises `CheckpointError` if some
        or all are missing."""
        from baton.drafters.mtp_chain import MtpChain

        num = _num_modules(read_config(path))
        drafter = cls(target, build) if num == 1 else MtpChain(target, build, num)
        num_target_layers = target.config.num_layers

        def rename(name: str) -> str | None:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            of_layer = name.startswith("model.layers.") and layer.isdecimal()
            module = int(layer) - num_target_layers if of_layer else -1
            if not 0 <= module < num or rest.startswith(_SHARED) or rest.endswith("rotary_emb.inv_freq"):
                return None
            if rest.startswith("shared_head."):
                rest = rest.removeprefix("shared_head.")
            elif not rest.startswith(_PARTS):
                rest = f"layer.{rest}"
            return f"layers.{module}.{rest}"

        fill(drafter, path, rename)
        return drafter.eval()

    def forward(
        self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, attend: LayerCache, first: bool
    ) -> tuple[Tensor, Tensor]:
        """One forward of the last module."""
        x = self.layers[-1](self._embed(next_ids_T), features_TF, self.rotary.at(positions_T), attend)
        return x, x


def _modules_config(config: ModelConfig, num: int) -> ModelConfig:
    """The target's config with `num` layers like its last one, with experts if the target has experts."""
    moe = config.moe and dataclasses.replace(config.moe, layers=(True,) * num)
    windows, ropes = config.windows[-1:] * num, config.layer_ropes[-1:] * num
    return dataclasses.replace(config, num_layers=num, windows=windows, layer_ropes=ropes, moe=moe)


def _num_modules(raw: RawConfig) -> int:
    if raw.get("model_type") not in _TYPES:
        known = ", ".join(_TYPES)
        raise CheckpointError(f"drafter: mtp is for targets of type {known}, this is {raw.get('model_type')!r}")
    # transformers reads the second name too.
    num = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 1))
    if type(num) is not int or not 1 <= num <= MAX_MODULES:
        raise CheckpointError(f"drafter: config.json: num_nextn_predict_layers is {num!r}, expected 1 to {MAX_MODULES}")
    if get_bool(raw, "mtp_hidden_states_first"):
        raise CheckpointError("drafter: config.json: mtp_hidden_states_first is not supported")
    return num

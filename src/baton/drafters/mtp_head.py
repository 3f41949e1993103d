"""The heads of a target's own multi-token prediction modules (DeepSeek-V3, arXiv:2412.19437, 2.2).

Row i of module j (from 1) takes x_{i+j}, and the target's final-norm state of position i or the output of module j - 1:
eh_proj(enorm(embedding), hnorm(state)), one layer of the target's kind, and a norm. The target's LM head reads the
output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from baton.drafters.head import HeadDrafter
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.layer_cache import LayerCache
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build, Linear


class Module(nn.Module):
    """One module: from embeddings and states [T, E] to states [T, E]."""

    def __init__(self, target: CausalLM, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = make_norm(config, hidden, build)
        self.hnorm = make_norm(config, hidden, build)
        self.eh_proj = Linear(2 * hidden, hidden, build)
        self.layer = target.layer(config, layer_id, build)
        self.norm = make_norm(config, hidden, build)

    def forward(self, embeds: Tensor, states: Tensor, cos_sin: tuple[Tensor, Tensor], attend: LayerCache) -> Tensor:
        return self.norm(self.layer(self._joined(embeds, states), cos_sin, attend))  # type: ignore[no-any-return]

    @property
    def writes(self) -> bool:
        return getattr(self.layer, "writes", False)

    def write(self, embeds: Tensor, states: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> None:
        self.layer.write(self._joined(embeds, states), cos_sin, cache)  # type: ignore[operator]

    def _joined(self, embeds: Tensor, states: Tensor) -> Tensor:
        return self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(states)), dim=-1))  # type: ignore[no-any-return]


class MtpHead(HeadDrafter):
    """`num_modules` modules. Embedding and LM head are the target's."""

    aux_layers = ()

    def __init__(self, target: CausalLM, build: Build, num_modules: int = 1) -> None:
        config = target.mtp_config(num_modules)
        super().__init__(config, [target.kv_layer(config, i) for i in range(num_modules)], target, set(), build)
        self.kv_modules = list(range(1, num_modules + 1))
        self.feature_size = config.hidden_size
        self.layers = nn.ModuleList(Module(target, config, i, build) for i in range(num_modules))
        self.writes = num_modules == 1 and self.layers[0].writes  # type: ignore[assignment]

    def forward(
        self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, attend: LayerCache, first: bool
    ) -> tuple[Tensor, Tensor]:
        x = self.layers[-1](self._embed(next_ids_T), features_TF, self.rotary.at(positions_T), attend)
        return x, x

    def write(self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, cache: LayerCache) -> None:
        self.layers[0].write(self._embed(next_ids_T), features_TF, self.rotary.at(positions_T), cache)  # type: ignore[operator]

"""DeepSeek-V4's multi-token prediction module (2026), whose states are all streams of the target's residual.

Row i takes the streams after the target's last layer at position i and x_{i+1}: each stream is a projection of its norm
plus one of the embedding's. Then come one layer with a window, the streams' weighted sum, a norm, and the target's LM
head. The module continues from its own streams.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from baton.drafters.head import HeadDrafter
from baton.models.base import CausalLM
from baton.models.families.deepseek_v4 import V4Config
from baton.models.families.hyper_connections import StreamHead
from baton.models.layer_cache import LayerCache
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build, Linear


class StreamModule(nn.Module):
    """Embeddings [T, E] and streams [T, N E] -> states [T, E] and streams."""

    def __init__(self, target: CausalLM, config: V4Config, build: Build) -> None:
        super().__init__()
        hidden = self._hidden = config.hidden_size
        self._count = config.streams.count
        self.enorm, self.hnorm = make_norm(config, hidden, build), make_norm(config, hidden, build)
        self.e_proj, self.h_proj = Linear(hidden, hidden, build), Linear(hidden, hidden, build)
        self.layer = target.layer(config, 0, build)
        self.hc_head = StreamHead(config.streams, hidden, build)
        self.norm = make_norm(config, hidden, build)

    def forward(
        self, embeds: Tensor, streams: Tensor, cos_sin: tuple[Tensor, Tensor], attend: LayerCache
    ) -> tuple[Tensor, Tensor]:
        each = self.h_proj(self.hnorm(streams.reshape(-1, self._hidden))).view_as(streams)
        x = self.layer(each + self.e_proj(self.enorm(embeds)).repeat(1, self._count), cos_sin, attend)
        return self.norm(self.hc_head(x)), x


class StreamMtp(HeadDrafter):
    """One module. Embedding and LM head are the target's."""

    def __init__(self, target: CausalLM, build: Build) -> None:
        config = cast(V4Config, target.mtp_config(1))
        super().__init__(config, [target.kv_layer(config, 0)], target, set(), build)
        # All streams after the last layer.
        self.aux_layers = (target.config.num_layers + 1,)
        self.feature_size = config.streams.count * config.hidden_size
        self.layers = nn.ModuleList([StreamModule(target, config, build)])

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Tensor:
        return aux[0]

    def forward(
        self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, attend: LayerCache, first: bool
    ) -> tuple[Tensor, Tensor]:
        cos_sin = self.rotary.at(positions_T)
        output: tuple[Tensor, Tensor] = self.layers[0](self._embed(next_ids_T), features_TF, cos_sin, attend)
        return output

"""EAGLE (Li et al., 2024, arXiv:2401.15077): one decoder layer that continues the target's last hidden state.

As in vLLM: fc(cat(embedding of x_{i+1}, hidden_i)), then the layers, the first without an input norm, and no final
norm. The residual stream is the input of both the LM head and the next draft step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from baton.drafters.head import HeadDrafter, attention_layers, expect_target_size, fill_drafter, head_tensors
from baton.drafters.head_config import EAGLE3_FIELDS, nested, read_head
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.layer_cache import LayerCache
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build, Linear


class Eagle(HeadDrafter):
    """`fc.bias` is used if the checkpoint has one."""

    aux_layers = ()

    def __init__(self, config: ModelConfig, target: CausalLM, names: set[str], build: Build) -> None:
        super().__init__(config, attention_layers(config), target, names, build)
        hidden = config.hidden_size
        self.feature_size = hidden
        self.fc = Linear(2 * hidden, hidden, build, bias="fc.bias" in names)
        self.layers = nn.ModuleList(DecoderLayer(config, i, build, input_norm=i > 0) for i in range(config.num_layers))
        self.writes = len(self.layers) == 1 and self.layers[0].writes  # type: ignore[assignment]
        if "lm_head.weight" in names:
            self.add_head(hidden, config.vocab_size, build)

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> Eagle:
        """Raises `CheckpointError`."""
        raw, config = read_head(path)
        for name in EAGLE3_FIELDS:
            if raw.get(name) or nested(raw).get(name):
                raise CheckpointError(f"drafter: config.json: {name} is for method eagle3, not eagle")
        expect_target_size(config.hidden_size, target)
        drafter = cls(config, target, head_tensors(path), build)
        # Some heads were saved with the input norm that their first layer does not use.
        fill_drafter(drafter, path, frozenset({"layers.0.input_layernorm.weight"}))
        return drafter.eval()

    def forward(
        self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, attend: LayerCache, first: bool
    ) -> tuple[Tensor, Tensor]:
        x, cos_sin = self._fuse(next_ids_T, features_TF), self.rotary.at(positions_T)
        for layer in self.layers:
            x = layer(x, cos_sin, attend)
        return x, x

    def write(self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, cache: LayerCache) -> None:
        x, cos_sin = self._fuse(next_ids_T, features_TF), self.rotary.at(positions_T)
        self.layers[0].write(x, cos_sin, cache)  # type: ignore[operator]

    def _fuse(self, next_ids_T: Tensor, features_TF: Tensor) -> Tensor:
        x: Tensor = self.fc(torch.cat((self._embed(next_ids_T), features_TF), dim=-1))
        return x

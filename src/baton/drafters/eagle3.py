"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): one decoder layer over features from three layers of the target.

As in vLLM: the features are the input residual streams of three target layers, concatenated and projected to the hidden
size by `fc`. The first layer attends over cat(input_layernorm(embedding of x_{i+1}), hidden_norm(h)). Its residual is
h, or the normed h with `norm_before_residual`. The LM head reads the final norm's output; the next draft step reads its
input.

EAGLE-3.1 (arXiv:2605.09992) adds `fc_norm`, `norm_before_fc` and `norm_output` (docs/drafters.md).
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch
from torch import Tensor, nn

from baton.drafters.base import DraftBatch
from baton.drafters.draft_passes import draft_passes
from baton.drafters.head import (
    FEW,
    HeadDrafter,
    attention_layers,
    expect_target_size,
    fill_drafter,
    head_tensors,
    target_ids,
)
from baton.drafters.head_config import LAYER_IDS, eagle_flag, nested, read_head
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, get_int
from baton.models.fused_drafts import MAX_ROWS, DraftHead, FusedDrafts
from baton.models.fused_layers import FusedLayers
from baton.models.layer_cache import LayerCache
from baton.models.layers.decoder_layer import Attention, DecoderLayer, FusionLayer
from baton.models.layers.latent import LatentAttention
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build, Linear

log = logging.getLogger(__name__)


def _attention(config: ModelConfig, layer_id: int, build: Build, in_features: int) -> nn.Module:
    """Llama attention, or MLA (`Eagle3DeepseekV2ForCausalLM`)."""
    kind = Attention if config.latent is None else LatentAttention
    return kind(config, layer_id, build, in_features)


def _layer(config: ModelConfig, layer_id: int, build: Build) -> DecoderLayer:
    return DecoderLayer(config, layer_id, build, attention=_attention(config, layer_id, build, config.hidden_size))


class Eagle3(HeadDrafter):
    """`d2t` int64 [draft_vocab] is optional, as in the published heads."""

    def __init__(self, config: ModelConfig, raw: RawConfig, target: CausalLM, names: set[str], build: Build) -> None:
        super().__init__(config, attention_layers(config), target, names, build)
        hidden = config.hidden_size
        self.aux_layers = aux_layer_ids(raw, len(target.kv_layers))
        self.feature_size = target.hidden_size * (len(self.aux_layers) or 1)
        self.fc = Linear(self.feature_size, hidden, build, bias="fc.bias" in names) if self.aux_layers else None
        self._add_norms(raw, target.hidden_size, config.rms_eps, build)
        attention = _attention(config, 0, build, 2 * hidden)
        first = FusionLayer(config, eagle_flag(raw, "norm_before_residual"), attention, build)
        self.layers = nn.ModuleList([first, *(_layer(config, i, build) for i in range(1, config.num_layers))])
        self.writes = len(self.layers) == 1 and attention.writes  # type: ignore[assignment]
        self.norm = RMSNorm(hidden, config.rms_eps, build)
        draft_vocab = get_int(raw, "draft_vocab_size", config.vocab_size)
        if "lm_head.weight" in names:
            self.add_head(hidden, draft_vocab, build)
        elif draft_vocab != target.vocab_size or hidden != target.hidden_size:
            raise CheckpointError(
                f"drafter: no lm_head.weight, and the target's ({target.vocab_size} x {target.hidden_size}) "
                f"does not fit draft_vocab_size {draft_vocab} and hidden_size {hidden}"
            )
        if "d2t" in names:
            self.register_buffer("d2t", torch.empty(draft_vocab, dtype=torch.int64, device=build.device))
        elif draft_vocab != target.vocab_size:
            raise CheckpointError(
                f"drafter: draft_vocab_size is {draft_vocab}, the target's vocab_size {target.vocab_size}, "
                "and there is no tensor d2t"
            )

    def _add_norms(self, raw: RawConfig, target_hidden: int, eps: float, build: Build) -> None:
        self._norm_output = eagle_flag(raw, "norm_output")
        self.input_norm, self.fc_norm = None, None
        if eagle_flag(raw, "norm_before_fc"):
            self.input_norm = RMSNorm(self.feature_size, eps, build)
        if eagle_flag(raw, "fc_norm"):
            self.fc_norm = nn.ModuleList(RMSNorm(target_hidden, eps, build) for _ in self.aux_layers)
        if self.fc is None and (self.input_norm is not None or self.fc_norm is not None):
            raise CheckpointError("drafter: config.json: norm_before_fc and fc_norm go with auxiliary hidden states")

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> Eagle3:
        """Raises `CheckpointError`."""
        raw, config = read_head(path)
        expect_target_size(get_int(raw, "target_hidden_size", config.hidden_size), target)
        names = head_tensors(path)
        drafter = cls(config, raw, target, names, build)
        # t2d only marks the target ids that have a draft id, as d2t shows.
        fill_drafter(drafter, path, frozenset({"t2d"} if drafter.fc is not None else {"t2d", "fc.weight"}))
        if "d2t" in names:
            drafter.draft_to_target = target_ids(drafter.get_buffer("d2t"), target.vocab_size)
        log.info(
            "the EAGLE-3 head reads the streams that enter layers %s of the target's %d (%d: what leaves the last)",
            ", ".join(map(str, drafter.aux_layers)) or "none",
            len(target.kv_layers),
            len(target.kv_layers),
        )
        return drafter.eval()

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Tensor:
        return torch.cat(aux, dim=-1) if self.aux_layers else hidden_TE

    @functools.cached_property
    def _fused(self) -> FusedDrafts | None:
        embedding, lm_head = self.embedding_and_head()
        if lm_head is None:
            return None
        head = DraftHead(embedding, self.fc, self.norm, self._norm_output, lm_head, self.draft_to_target)
        return FusedDrafts.of(FusedLayers.of(self.layers, [0] * len(self.layers)), self.rotary, head)

    def extend(self, batch: DraftBatch) -> tuple[Tensor, Tensor] | list[list[int]]:  # type: ignore[override]
        """The drafts, if all passes run in one call."""
        fused, features = self._fused, batch.features_TF
        assert features is not None
        # Outputs of other rows are unused.
        num_rows, num_drafting = len(batch.positions), np.count_nonzero(batch.num_drafts)
        last_only = self.writes and (num_rows > MAX_ROWS or num_rows >= FEW * num_drafting)
        passes = None if fused is None else draft_passes(batch, fused.regions, last_only)
        if fused is None or passes is None:
            return super().extend(batch)
        drafts: list[list[int]] = [[] for _ in batch.num_drafts]
        ids = batch.next_ids
        if last_only:
            self.write_rows(batch)
            last = batch.query_start[1:].astype(np.int64)[np.flatnonzero(batch.num_drafts)] - 1
            ids, features = ids[last], features[self._tensor(last)]
        if passes:
            margins = [np.empty(one.num_sampled) for one, _ in passes if batch.margins is not None]
            chosen = fused.run(ids, self._normed(features).contiguous(), [one for one, _ in passes], margins)
            for step, ((_, going), tokens) in enumerate(zip(passes, chosen, strict=True)):
                if batch.margins is not None and len(going):
                    batch.margins[going, step] = margins[step]
                for request, token in zip(going.tolist(), tokens.tolist(), strict=True):
                    drafts[request].append(token)
        return drafts

    def write(self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, cache: LayerCache) -> None:
        embeds, cos_sin = self._embed(next_ids_T), self.rotary.at(positions_T)
        self.layers[0].write(embeds, self._fuse(features_TF), cos_sin, cache)  # type: ignore[operator]

    def draft(self, batch: DraftBatch, extended: tuple[Tensor, Tensor] | list[list[int]]) -> list[list[int]]:
        return extended if isinstance(extended, list) else super().draft(batch, extended)

    def forward(
        self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, attend: LayerCache, first: bool
    ) -> tuple[Tensor, Tensor]:
        x = self._fuse(features_TF) if first else features_TF
        cos_sin = self.rotary.at(positions_T)
        x = self.layers[0](self._embed(next_ids_T), x, cos_sin, attend)
        for layer in self.layers[1:]:
            x = layer(x, cos_sin, attend)
        normed = self.norm(x)
        return normed, normed if self._norm_output else x

    def _fuse(self, features_TF: Tensor) -> Tensor:
        """One hidden state [T, E] from the features of all target layers [T, F]."""
        x = self._normed(features_TF)
        return x if self.fc is None else self.fc(x)

    def _normed(self, features_TF: Tensor) -> Tensor:
        x = features_TF
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norm is not None:
            parts = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return x


def aux_layer_ids(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """Target layers that feed the head, ascending: from the config, else vLLM's default (2, L // 2, L - 3).

    Id i is the residual stream that enters layer i, as in vLLM. Empty when `use_aux_hidden_state` is false. Raises
    `CheckpointError`.
    """
    inner = nested(raw)
    if not eagle_flag(raw, "use_aux_hidden_state", True):
        return ()
    given = [(key, section[key]) for section in (raw, inner) for key in LAYER_IDS if section.get(key)]
    key, ids = given[0] if given else (LAYER_IDS[0], [2, num_layers // 2, num_layers - 3])
    if any(other != ids for _, other in given):
        raise CheckpointError(f"drafter: config.json: {key} is {ids!r}, and elsewhere something else")
    valid = isinstance(ids, list | tuple) and all(type(i) is int and 0 <= i <= num_layers for i in ids)
    # Features are concatenated in layer order, so a layer cannot appear twice.
    if not valid or len(set(ids)) != len(ids):
        raise CheckpointError(f"drafter: config.json: {key} is {ids!r}, expected distinct layers in 0..{num_layers}")
    if get_int(raw, "num_aux_hidden_states", len(ids)) != len(ids):
        raise CheckpointError(f"drafter: config.json: num_aux_hidden_states does not fit {key} {ids!r}")
    return tuple(sorted(ids))

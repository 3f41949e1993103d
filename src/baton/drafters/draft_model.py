"""A complete small model of any registered type as the drafter (Leviathan et al., 2023, arXiv:2211.17192).

It reads tokens only: entry i of its KV, which row i of a batch writes, depends on x_0..x_i, like the target's. States
continue from the last row, not from drafts (docs/drafters.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.drafters.base import DraftBatch
from baton.drafters.chain import IntArray
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.layer_cache import LayerSpec
from baton.models.layers.linear import Build
from baton.models.loading.loader import load_model


class DraftModel:
    """No entries and no drafts beyond the context length of the small model."""

    aux_layers: tuple[int, ...] = ()
    needs_contexts = True

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self._model, self._device = model, device
        self.kv_layers: Sequence[LayerSpec] = model.kv_layers
        self.kv_modules: Sequence[int | None] = [None] * len(model.kv_layers)

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> DraftModel:
        """Raises `CheckpointError` for another vocabulary."""
        model = load_model(path, build.dtype, build.device, build.batch_invariant, quantization=build.quantization)
        if model.vocab_size != target.vocab_size:
            raise CheckpointError(f"drafter: vocab_size is {model.vocab_size}, the target's is {target.vocab_size}")
        return cls(model, build.device)

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> None:
        return None

    def extend(self, batch: DraftBatch) -> Tensor | None:
        """Final-norm states [R', E] at the token after the last row of each of the R' requests that get drafts."""
        starts = batch.positions[batch.query_start[:-1]]
        stops = batch.positions[batch.query_start[1:] - 1] + 1
        limit = self._model.max_position
        last = np.minimum(stops + (self._counts(batch) > 0), limit)
        requests = np.flatnonzero(last > starts)
        if not len(requests):
            return None
        spans = [np.arange(start, stop) for start, stop in zip(starts[requests], last[requests], strict=True)]
        ids = [batch.contexts[r][span] for r, span in zip(requests.tolist(), spans, strict=True)]
        query_start = np.concatenate(([0], np.cumsum([len(span) for span in spans]))).astype(np.int32)
        hidden_TE = self._forward(batch, requests, np.concatenate(ids), np.concatenate(spans), query_start)
        drafting = np.flatnonzero(self._counts(batch)[requests])
        return hidden_TE[self._tensor(query_start[1:][drafting].astype(np.int64) - 1)]

    def draft(self, batch: DraftBatch, extended: Tensor | None) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch.num_drafts]
        counts = self._counts(batch)
        going = np.flatnonzero(counts)
        if extended is None or not len(going):
            return drafts
        next_positions = batch.positions[batch.query_start[1:][going].astype(np.int64) - 1] + 2
        hidden_RE = extended
        for step in range(int(counts.max())):
            ids = batch.choose(self._model.compute_logits(hidden_RE), going, step, None)
            for request, token in zip(going.tolist(), ids.tolist(), strict=True):
                drafts[request].append(token)
            more = np.flatnonzero(counts[going] > step + 1)
            if not len(more):
                break
            going, next_positions, ids = going[more], next_positions[more], ids[more]
            query_start = np.arange(len(going) + 1, dtype=np.int32)
            hidden_RE = self._forward(batch, going, ids, next_positions + step, query_start)
        return drafts

    def _counts(self, batch: DraftBatch) -> IntArray:
        """Drafts per request. All but the last must be within the small model's context."""
        next_positions = batch.positions[batch.query_start[1:] - 1] + 1
        counts: IntArray = np.clip(self._model.max_position - next_positions, 0, batch.num_drafts)
        return counts

    def _forward(
        self, batch: DraftBatch, requests: IntArray, ids: IntArray, positions: IntArray, query_start: np.ndarray
    ) -> Tensor:
        cache = batch.pages.bind(requests, positions, query_start)
        hidden_TE: Tensor = self._model(self._tensor(ids), self._tensor(positions), cache)[0]
        return hidden_TE

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

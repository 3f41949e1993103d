"""The smallest possible runner: one request's pages and an `Attend` over them, for tests of models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.base import AttentionBackend, AttnBatch
from baton.models.layer_cache import AttnRows, KVLayerSpec, LayerSpec


class PagedSequence:
    """KV of one sequence of at most `max_tokens`, for layers with keys and values, in pages of random order.

    Unwritten slots hold NaN, so that reading one shows.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        backend: AttentionBackend,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        max_tokens: int = 512,
    ) -> None:
        self._layers, self._backend = layers, backend
        num_pages = -(-max_tokens // page_size) + 1
        self._kv = {
            layer: torch.full((num_pages, 1, 2, page_size, spec.num_kv_heads, spec.head_dim), float("nan"), dtype=dtype)
            for layer, spec in enumerate(layers)
            if isinstance(spec, KVLayerSpec)
        }
        order = np.random.default_rng(0).permutation(np.arange(1, num_pages))
        self._page_table = order.astype(np.int32)[None]
        self._batch = AttnBatch(np.zeros(1, np.int32), np.zeros(0, np.int64), self._page_table)

    def rows(self, start: int, stop: int) -> Tensor:
        """Make rows [start, stop) the next forward's. Returns their positions, int64 [T]."""
        positions = np.arange(start, stop, dtype=np.int64)
        query_start = np.array([0, stop - start], np.int32)
        self._batch = AttnBatch(query_start, positions, self._page_table)
        return torch.from_numpy(positions)

    def __call__(self, layer_id: int, rows: AttnRows) -> Tensor:
        spec = self._layers[layer_id]
        assert isinstance(spec, KVLayerSpec)
        return self._backend.write_and_attend(self._kv[layer_id], 0, rows, self._batch, spec.window)

    def attend_kept(self, layer_id: int, q_THD: Tensor, scale: float, window: int | None) -> Tensor:
        rows = AttnRows(q_THD, None, None, scale)
        return self._backend.write_and_attend(self._kv[layer_id], 0, rows, self._batch, window)

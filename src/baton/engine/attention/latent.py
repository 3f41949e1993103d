"""Attention over latents (MLA) on any device.

The absorbed form is batch-invariant: online softmax over tiles of 64 keys at absolute positions, in matrix products of
one shape. In the expanded form, a row's bits depend on the number of rows and keys.

Shapes: T rows, S cached rows, H heads, W latent and rope key side by side, C latent, D query and key, V value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import AttnBatch, slot_error
from baton.engine.attention.latent_cpu import absorbed
from baton.engine.attention.sdpa import mark_nonfinite_rows, zero_nonfinite
from baton.kernels.cpu.scalar import supports
from baton.models.cache import LatentHeads

_TILE = 64
_ROW_BLOCK = 16
# Maximum number of elements of keys and values expanded at once: half a gigabyte in bfloat16, whatever the context.
_MOST_EXPANDED = 1 << 28


class PagedLatentAttention:
    """One layer's latents. `planes`: one or two [pages, layers, page_size, 1, width]; the widths add up to W."""

    def __init__(self, planes: Sequence[Tensor], layer: int, batch: AttnBatch) -> None:
        self._planes, self._layer, self._batch = planes, layer, batch
        self._page_size, self._num_pages, self._device = planes[0].shape[2], planes[0].shape[0], planes[0].device

    def attend(
        self, q_THD: Tensor, latent_TC: Tensor, rope_TR: Tensor, scale: float, heads: LatentHeads | None = None
    ) -> Tensor:
        """As `LayerCache.attend_latent`. Raises `BatonError` for a slot in the null page or outside the page table."""
        self._write(torch.cat((latent_TC, rope_TR), dim=-1))
        latent_dim = latent_TC.shape[-1]
        if heads is None:
            return self._absorbed(self._batch, q_THD, latent_dim, scale)
        expanded = [
            (r, start, stop)
            for r, start, stop in self._requests(self._batch)
            if not heads.always_absorbed and self._is_cheaper_expanded(q_THD, start, stop, latent_dim, heads)
        ]
        if not expanded:
            return heads.values(self._absorbed(self._batch, heads.absorb(q_THD), latent_dim, scale))
        out = q_THD.new_empty(*q_THD.shape[:2], heads.value_dim)
        for r, start, stop in expanded:
            out[start:stop] = self._expanded(r, q_THD[start:stop], self._batch.positions[start:stop], scale, heads)
        rest, rows = self._without([r for r, _, _ in expanded])
        if len(rows):
            at = torch.from_numpy(rows).to(self._device)
            out[at] = heads.values(self._absorbed(rest, heads.absorb(q_THD[at]), latent_dim, scale))
        return out

    def _is_cheaper_expanded(self, q_THD: Tensor, start: int, stop: int, latent_dim: int, heads: LatentHeads) -> bool:
        """Whether expansion costs a request fewer multiplications than it saves. The cost counts twice, since keys and
        values are also written, padded and read again."""
        rows, kept, value = stop - start, int(self._batch.positions[stop - 1]) + 1, heads.value_dim
        rope = sum(plane.shape[-1] for plane in self._planes) - latent_dim
        nope = q_THD.shape[-1] - rope
        once = kept * latent_dim * (nope + value)
        saved = rows * (latent_dim * (nope + value) + kept * (2 * latent_dim - nope - value))
        made = kept * q_THD.shape[1] * (q_THD.shape[2] + value)
        return 2 * once < saved and made <= _MOST_EXPANDED

    def _requests(self, batch: AttnBatch) -> Iterator[tuple[int, int, int]]:
        """(index, start, stop) of each request that has rows."""
        for r, (start, stop) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True)):
            if start < stop:
                yield r, int(start), int(stop)

    def _without(self, requests: list[int]) -> tuple[AttnBatch, np.ndarray]:
        """The batch without these requests, and the indices of its rows, int64."""
        counts = np.diff(self._batch.query_start)
        owner = np.repeat(np.arange(len(counts)), counts)
        counts[requests] = 0
        rows = np.flatnonzero(~np.isin(owner, requests))
        query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return AttnBatch(query_start, self._batch.positions[rows], self._batch.page_table), rows

    def _slots(self, owner: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Page and slot of each position of the request in `owner`."""
        columns, table = positions // self._page_size, self._batch.page_table
        if len(columns) and columns.max() >= table.shape[1]:
            raise slot_error()
        pages = table[owner, columns].astype(np.int64)
        if len(pages) and (pages.min() <= 0 or pages.max() >= self._num_pages):
            raise slot_error()
        return torch.from_numpy(pages).to(self._device), torch.from_numpy(positions % self._page_size).to(self._device)

    def _write(self, kept_TW: Tensor) -> None:
        counts = np.diff(self._batch.query_start)
        pages, offsets = self._slots(np.repeat(np.arange(len(counts)), counts), self._batch.positions)
        parts = torch.split(kept_TW, [plane.shape[-1] for plane in self._planes], dim=-1)
        for plane, part in zip(self._planes, parts, strict=True):
            plane[pages, self._layer, offsets, 0] = part.to(plane.dtype)

    def _kept(self, request: int, first: int, last: int) -> Tensor:
        """Cached rows [first, last): [S, W] in the cache's dtype."""
        pages, offsets = self._slots(np.full(last - first, request), np.arange(first, last))
        return torch.cat([plane[pages, self._layer, offsets, 0] for plane in self._planes], dim=-1)

    def _expanded(self, request: int, q_THD: Tensor, positions: np.ndarray, scale: float, heads: LatentHeads) -> Tensor:
        keys, values = heads.expand(self._kept(request, 0, int(positions[-1]) + 1).to(q_THD.dtype))
        # PyTorch's flash attention needs one head size for q, k and v.
        size = max(q_THD.shape[-1], values.shape[-1])
        q, k, v = (F.pad(part, (0, size - part.shape[-1])).transpose(0, 1)[None] for part in (q_THD, keys, values))
        mask = None
        if len(positions) < len(keys):
            mask = torch.from_numpy(np.arange(len(keys))[None, :] <= positions[:, None]).to(self._device)
        k, v, nonfinite_T = zero_nonfinite(k, v, mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return mark_nonfinite_rows(out[0].transpose(0, 1)[..., : heads.value_dim], nonfinite_T)

    def _absorbed(self, batch: AttnBatch, q_THW: Tensor, latent_dim: int, scale: float) -> Tensor:
        if supports(self._device, q_THW.dtype) and all(plane.dtype == q_THW.dtype for plane in self._planes):
            return absorbed(self._planes, self._layer, q_THW, latent_dim, scale, batch)
        heads, width = q_THW.shape[1:]
        out = torch.empty(len(q_THW), heads, latent_dim, dtype=torch.float32, device=q_THW.device)
        for r, start, stop in self._requests(batch):
            for first in range(start, stop, _ROW_BLOCK):
                last = min(first + _ROW_BLOCK, stop)
                block = q_THW.new_zeros(_ROW_BLOCK, heads, width, dtype=torch.float32)
                block[: last - first] = q_THW[first:last].float() * scale
                rows = torch.from_numpy(batch.positions[first:last]).to(q_THW.device)
                positions = F.pad(rows, (0, _ROW_BLOCK - len(rows)), value=int(rows[-1]))
                attended = self._tiles(r, block.view(-1, width), positions.repeat_interleave(heads), latent_dim)
                out[first:last] = attended.view(_ROW_BLOCK, heads, latent_dim)[: last - first]
        return out.to(q_THW.dtype)

    def _tiles(self, request: int, q_NW: Tensor, positions_N: Tensor, latent_dim: int) -> Tensor:
        """Absorbed attention of N vectors (rows times heads) of one request: [N, C]."""
        limit = int(positions_N[-1]) + 1
        peak = q_NW.new_full((len(q_NW), 1), -torch.inf)
        total, out = torch.zeros_like(peak), q_NW.new_zeros(len(q_NW), latent_dim)
        lanes = torch.arange(_TILE, device=q_NW.device)
        for base in range(0, limit, _TILE):
            tile = q_NW.new_zeros(_TILE, q_NW.shape[-1])
            kept = self._kept(request, base, min(base + _TILE, limit))
            tile[: len(kept)] = kept
            # A non-finite token makes the rows that see it NaN. It must not reach other rows: 0 times NaN is NaN.
            bad = ~tile.sum(dim=1, keepdim=True).isfinite()
            tile = tile.masked_fill(bad, 0.0)
            hidden = lanes[None, :] + base > positions_N[:, None]
            scores = (q_NW @ tile.T).masked_fill(bad.T, torch.nan).masked_fill(hidden, -torch.inf)
            # Every row sees position 0, so no row's peak stays at minus infinity.
            highest = torch.maximum(peak, scores.amax(dim=1, keepdim=True))
            weights, rescale = torch.exp(scores - highest), torch.exp(peak - highest)
            total = total * rescale + weights.sum(dim=1, keepdim=True)
            out = out * rescale + weights @ tile[:, :latent_dim]
            peak = highest
        return out / total

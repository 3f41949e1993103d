"""Attention over latents (MLA) on any device.

Absorbed, a row comes out with the same bits in every batch: online softmax over tiles of 64 keys at absolute positions,
in products of one shape. Expanded, its bits depend on the number of rows and keys.

Shapes: T rows, S kept rows, H heads, W = latent and rope key side by side, C latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention import AttnBatch, slot_error
from baton.models.cache import Expand

_TILE = 64
_ROW_BLOCK = 16


class Latents:
    """One layer's latents for the rows of one forward: `planes` [pages, layers, page_size, 1, width], one or two, that
    hold W numbers a token together."""

    def __init__(self, planes: Sequence[Tensor], layer: int, batch: AttnBatch) -> None:
        self._planes = [plane[:, layer, :, 0] for plane in planes]
        self._batch, self._page_size, self._num_pages = batch, planes[0].shape[2], planes[0].shape[0]

    def attend(
        self, q_THD: Tensor, latent_TC: Tensor, rope_TR: Tensor, scale: float, expand: Expand | None = None
    ) -> Tensor:
        """As `LayerCache.attend_latent`. Raises `BatonError` for a slot in the null page or outside the page table."""
        self._write(torch.cat((latent_TC, rope_TR), dim=-1))
        if expand is None:
            out = self._absorbed(q_THD, latent_TC.shape[-1], scale)
        else:
            out = self._expanded(q_THD, scale, expand)
        return out.to(q_THD.dtype)

    def _requests(self) -> Iterator[tuple[int, int, int]]:
        """Number and rows of each request that has rows."""
        for r, (start, stop) in enumerate(zip(self._batch.query_start[:-1], self._batch.query_start[1:], strict=True)):
            if start < stop:
                yield r, int(start), int(stop)

    def _slots(self, request: int, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        columns, table = positions // self._page_size, self._batch.page_table[request]
        if columns[-1] >= table.size:
            raise slot_error()
        pages = table[columns].astype(np.int64)
        if pages.min() <= 0 or pages.max() >= self._num_pages:
            raise slot_error()
        device = self._planes[0].device
        return torch.from_numpy(pages).to(device), torch.from_numpy(positions % self._page_size).to(device)

    def _write(self, kept_TW: Tensor) -> None:
        where = [
            (start, stop, self._slots(r, self._batch.positions[start:stop])) for r, start, stop in self._requests()
        ]
        for start, stop, (pages, offsets) in where:
            parts = torch.split(kept_TW[start:stop], [plane.shape[-1] for plane in self._planes], dim=-1)
            for plane, part in zip(self._planes, parts, strict=True):
                plane[pages, offsets] = part.to(plane.dtype)

    def _kept(self, request: int, first: int, last: int) -> Tensor:
        """Kept rows [first, last), [S, W] in the cache's dtype."""
        pages, offsets = self._slots(request, np.arange(first, last))
        return torch.cat([plane[pages, offsets] for plane in self._planes], dim=-1)

    def _absorbed(self, q_THW: Tensor, latent_dim: int, scale: float) -> Tensor:
        heads, width = q_THW.shape[1:]
        out = torch.empty(len(q_THW), heads, latent_dim, dtype=torch.float32, device=q_THW.device)
        for r, start, stop in self._requests():
            for first in range(start, stop, _ROW_BLOCK):
                last = min(first + _ROW_BLOCK, stop)
                block = q_THW.new_zeros(_ROW_BLOCK, heads, width, dtype=torch.float32)
                block[: last - first] = q_THW[first:last].float() * scale
                rows = torch.from_numpy(self._batch.positions[first:last]).to(q_THW.device)
                positions = F.pad(rows, (0, _ROW_BLOCK - len(rows)), value=int(rows[-1]))
                attended = self._tiles(r, block.view(-1, width), positions.repeat_interleave(heads), latent_dim)
                out[first:last] = attended.view(_ROW_BLOCK, heads, latent_dim)[: last - first]
        return out

    def _tiles(self, request: int, q_NW: Tensor, positions_N: Tensor, latent_dim: int) -> Tensor:
        """N rows of one request, padded to a block: [N, C]."""
        limit = int(positions_N[-1]) + 1
        peak = q_NW.new_full((len(q_NW), 1), -torch.inf)
        total, out = torch.zeros_like(peak), q_NW.new_zeros(len(q_NW), latent_dim)
        lanes = torch.arange(_TILE, device=q_NW.device)
        for base in range(0, limit, _TILE):
            tile = q_NW.new_zeros(_TILE, q_NW.shape[-1])
            kept = self._kept(request, base, min(base + _TILE, limit))
            tile[: len(kept)] = kept
            hidden = lanes[None, :] + base > positions_N[:, None]
            scores = (q_NW @ tile.T).masked_fill(hidden, -torch.inf)
            # Position 0 is visible to every row, so no row's peak stays at minus infinity.
            highest = torch.maximum(peak, scores.amax(dim=1, keepdim=True))
            weights, rescale = torch.exp(scores - highest), torch.exp(peak - highest)
            total = total * rescale + weights.sum(dim=1, keepdim=True)
            out = out * rescale + weights @ tile[:, :latent_dim]
            peak = highest
        return out / total

    def _expanded(self, q_THD: Tensor, scale: float, expand: Expand) -> Tensor:
        parts = []
        for r, start, stop in self._requests():
            positions = self._batch.positions[start:stop]
            keys, values = expand(self._kept(r, 0, int(positions[-1]) + 1).to(q_THD.dtype))
            mask = torch.from_numpy(np.arange(len(keys))[None, :] <= positions[:, None]).to(q_THD.device)
            # [1, heads, tokens, D], as SDPA wants it.
            q, k, v = (part.transpose(0, 1)[None] for part in (q_THD[start:stop], keys, values))
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1))
        return torch.cat(parts)

"""Attention over latents (MLA) on any device.

The absorbed form is batch-invariant: online softmax over tiles of 64 keys at absolute positions. In the expanded form,
a row's bits depend on the number of rows and keys.

Shapes: T rows, S cached rows, H heads, W latent and rope key side by side, C latent, D query and key, V value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.latent_cpu import attend_latents
from baton.engine.attention.sdpa import mark_nonfinite_rows, zero_nonfinite
from baton.kernels.cpu.scalar import supports
from baton.models.layer_cache import Chosen, LatentHeads, LatentRows, slot_error

_TILE = 64
_ROW_BLOCK = 16
# Elements of keys and values expanded at once: 512 MiB in bfloat16.
_MOST_EXPANDED = 1 << 28


class PagedLatents:
    """A layer's latents in pages. `planes`: [pages, layers, page_size, 1, width], whose widths add up to W."""

    def __init__(self, planes: Sequence[Tensor], layer: int, batch: AttnBatch) -> None:
        self.batch = batch
        self.planes, self.layer = planes, layer
        self._page_size, self._num_pages, self._device = planes[0].shape[2], planes[0].shape[0], planes[0].device

    def requests(self, batch: AttnBatch) -> Iterator[tuple[int, int, int]]:
        for r, (start, stop) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True)):
            if start < stop:
                yield r, int(start), int(stop)

    def _slots(self, owner: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        columns, table = positions // self._page_size, self.batch.page_table
        if len(columns) and columns.max() >= table.shape[1]:
            raise slot_error()
        pages = table[owner, columns].astype(np.int64)
        if len(pages) and (pages.min() <= 0 or pages.max() >= self._num_pages):
            raise slot_error()
        return torch.from_numpy(pages).to(self._device), torch.from_numpy(positions % self._page_size).to(self._device)

    def write(self, kept_TW: Tensor) -> None:
        counts = np.diff(self.batch.query_start)
        pages, offsets = self._slots(np.repeat(np.arange(len(counts)), counts), self.batch.positions)
        parts = torch.split(kept_TW, [plane.shape[-1] for plane in self.planes], dim=-1)
        for plane, part in zip(self.planes, parts, strict=True):
            plane[pages, self.layer, offsets, 0] = part.to(plane.dtype)

    def kept(self, request: int, first: int, last: int) -> Tensor:
        """Latents [S, W] of positions `first` to `last - 1`, in the cache's dtype."""
        return self.kept_at(np.full(last - first, request), np.arange(first, last))

    def kept_at(self, owner: np.ndarray, positions: np.ndarray) -> Tensor:
        """[S, W]: at each position of the request in `owner`."""
        pages, offsets = self._slots(owner, positions)
        return torch.cat([plane[pages, self.layer, offsets, 0] for plane in self.planes], dim=-1)

    def by_entries(self, rate: int, batch: AttnBatch) -> PagedLatents:
        """The same memory with one row per `rate` tokens. `batch`: positions counted in entries."""
        return PagedLatents(
            [plane.view(*plane.shape[:2], -1, rate, plane.shape[4]).flatten(3)[:, :, :, None] for plane in self.planes],
            self.layer,
            batch,
        )


class PagedLatentAttention(PagedLatents):
    """Writes and attends. With `chosen` keys a row that sees more than `top_k` attends to these only."""

    def attend(self, rows: LatentRows) -> Tensor:
        """As `LayerCache.attend_latent`. Raises `BatonError` for a bad slot."""
        self.write(torch.cat((rows.latent_TC, rows.rope_TR), dim=-1))
        q_THD, heads, chosen, latent_dim = rows.q_THD, rows.heads, rows.chosen, rows.latent_TC.shape[-1]
        if chosen is None or not len(chosen.rows):
            return self._to_all(self.batch, q_THD, latent_dim, rows.scale, heads)
        out = q_THD.new_empty(*q_THD.shape[:2], latent_dim if heads is None else heads.value_dim)
        is_dense = np.ones(len(q_THD), dtype=bool)
        is_dense[chosen.rows] = False
        if is_dense.any():
            at = torch.from_numpy(np.flatnonzero(is_dense)).to(self._device)
            out[at] = self._to_all(_with_rows(self.batch, is_dense), q_THD[at], latent_dim, rows.scale, heads)
        at = torch.from_numpy(chosen.rows).to(self._device)
        q_NHW = q_THD[at] if heads is None else heads.absorb(q_THD[at])
        sums = self._to_chosen(q_NHW, chosen, latent_dim, rows.scale)
        out[at] = sums if heads is None else heads.values(sums)
        return out

    def _to_chosen(self, q_NHW: Tensor, chosen: Chosen, latent_dim: int, scale: float) -> Tensor:
        """Absorbed attention [N, H, C] of rows to the keys that each chose."""
        counts = np.diff(self.batch.query_start)
        owner = np.repeat(np.arange(len(counts)), counts)[chosen.rows]
        top_k, outs = chosen.positions.shape[1], []
        for begin in range(0, len(owner), _ROW_BLOCK):
            positions, owners = chosen.positions[begin : begin + _ROW_BLOCK], owner[begin : begin + _ROW_BLOCK]
            kept = self.kept_at(np.repeat(owners, top_k), positions.reshape(-1)).view(len(owners), top_k, -1)
            outs.append(
                attend_own(kept, np.full(len(owners), top_k), q_NHW[begin : begin + _ROW_BLOCK], latent_dim, scale)
            )
        return torch.cat(outs)

    def _to_all(
        self, batch: AttnBatch, q_THD: Tensor, latent_dim: int, scale: float, heads: LatentHeads | None
    ) -> Tensor:
        if heads is None:
            return self.absorbed(batch, q_THD, latent_dim, scale)
        expanded = [
            (r, start, stop)
            for r, start, stop in self.requests(batch)
            if not heads.always_absorbed and self._is_cheaper_expanded(batch, q_THD, start, stop, latent_dim, heads)
        ]
        if not expanded:
            return heads.values(self.absorbed(batch, heads.absorb(q_THD), latent_dim, scale))
        out = q_THD.new_empty(*q_THD.shape[:2], heads.value_dim)
        is_rest = np.ones(len(q_THD), dtype=bool)
        for r, start, stop in expanded:
            out[start:stop] = self._expanded(r, q_THD[start:stop], batch.positions[start:stop], scale, heads)
            is_rest[start:stop] = False
        if is_rest.any():
            at = torch.from_numpy(np.flatnonzero(is_rest)).to(self._device)
            rest = _with_rows(batch, is_rest)
            out[at] = heads.values(self.absorbed(rest, heads.absorb(q_THD[at]), latent_dim, scale))
        return out

    def _is_cheaper_expanded(
        self, batch: AttnBatch, q_THD: Tensor, start: int, stop: int, latent_dim: int, heads: LatentHeads
    ) -> bool:
        """Whether expansion saves multiplications. Its cost counts twice: keys and values are also written, padded and
        read again.
        """
        rows, kept, value = stop - start, int(batch.positions[stop - 1]) + 1, heads.value_dim
        rope = sum(plane.shape[-1] for plane in self.planes) - latent_dim
        nope = q_THD.shape[-1] - rope
        once = kept * latent_dim * (nope + value)
        saved = rows * (latent_dim * (nope + value) + kept * (2 * latent_dim - nope - value))
        made = kept * q_THD.shape[1] * (q_THD.shape[2] + value)
        return 2 * once < saved and made <= _MOST_EXPANDED

    def _expanded(self, request: int, q_THD: Tensor, positions: np.ndarray, scale: float, heads: LatentHeads) -> Tensor:
        keys, values = heads.expand(self.kept(request, 0, int(positions[-1]) + 1).to(q_THD.dtype))
        # PyTorch's flash attention needs one head size for q, k and v.
        size = max(q_THD.shape[-1], values.shape[-1])
        q, k, v = (F.pad(part, (0, size - part.shape[-1])).transpose(0, 1)[None] for part in (q_THD, keys, values))
        mask = None
        if len(positions) < len(keys):
            mask = torch.from_numpy(np.arange(len(keys))[None, :] <= positions[:, None]).to(self._device)
        k, v, nonfinite_T = zero_nonfinite(k, v, mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return mark_nonfinite_rows(out[0].transpose(0, 1)[..., : heads.value_dim], nonfinite_T)

    def absorbed(self, batch: AttnBatch, q_THW: Tensor, latent_dim: int, scale: float) -> Tensor:
        if supports(self._device, q_THW.dtype) and all(plane.dtype == q_THW.dtype for plane in self.planes):
            return attend_latents(self.planes, self.layer, q_THW, latent_dim, scale, batch)
        heads, width = q_THW.shape[1:]
        out = torch.empty(len(q_THW), heads, latent_dim, dtype=torch.float32, device=q_THW.device)
        for r, start, stop in self.requests(batch):
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
            kept = self.kept(request, base, min(base + _TILE, limit))
            tile[: len(kept)] = kept
            # A non-finite token must affect only rows that see it, and 0 times NaN is NaN.
            bad = ~tile.sum(dim=1, keepdim=True).isfinite()
            tile = tile.masked_fill(bad, 0.0)
            hidden = lanes[None, :] + base > positions_N[:, None]
            scores = (q_NW @ tile.T).masked_fill(bad.T, torch.nan).masked_fill(hidden, -torch.inf)
            # Every row sees position 0, so no peak stays at minus infinity.
            highest = torch.maximum(peak, scores.amax(dim=1, keepdim=True))
            weights, rescale = torch.exp(scores - highest), torch.exp(peak - highest)
            total = total * rescale + weights.sum(dim=1, keepdim=True)
            out = out * rescale + weights @ tile[:, :latent_dim]
            peak = highest
        return out / total


def _with_rows(batch: AttnBatch, is_kept: np.ndarray) -> AttnBatch:
    """The batch with only the rows `is_kept` [T]: the first or the last rows of each request."""
    counts = np.add.reduceat(np.append(is_kept, False), batch.query_start[:-1]) * (np.diff(batch.query_start) > 0)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return AttnBatch(query_start, batch.positions[is_kept], batch.page_table)


def attend_own(kept_NSW: Tensor, counts: np.ndarray, q_NHW: Tensor, latent_dim: int, scale: float) -> Tensor:
    """Absorbed attention [N, H, C] of each row to its own keys, the first `counts` [N] of its S."""
    num, longest, width = kept_NSW.shape
    # One page per row; page 0 is the null page.
    pages = kept_NSW.new_zeros(num + 1, 1, longest, 1, width)
    pages[1:, 0, :, 0] = kept_NSW
    numbers = np.arange(num + 1, dtype=np.int32)
    batch = AttnBatch(numbers, counts.astype(np.int64) - 1, numbers[1:, None].copy())
    return PagedLatentAttention([pages], 0, batch).absorbed(batch, q_NHW, latent_dim, scale)

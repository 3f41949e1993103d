"""Attention with PyTorch's `scaled_dot_product_attention` on any device. Gathers pages, one request at a time.

Not batch-invariant: last bits vary with the number of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.models.layer_cache import AttnRows, slot_error


@dataclass(frozen=True, slots=True)
class _Request:
    """Indices of rows and visible keys. `mask` [rows, keys]: visible."""

    rows: slice
    pages: Tensor
    offsets: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """A batch's indices on the device, for all layers with one window and page size."""

    pages: Tensor
    offsets: Tensor
    requests: list[_Request]


class SdpaBackend:
    name = "sdpa"
    batch_invariant = False

    def write_and_attend(self, kv: Tensor, layer: int, rows: AttnRows, batch: AttnBatch, window: int | None) -> Tensor:
        plan = batch.plan(("sdpa", kv.shape, window), lambda: _make_plan(kv, batch, window))
        if rows.k_TGD is not None and rows.v_TGD is not None:
            kv[plan.pages, layer, 0, plan.offsets] = rows.k_TGD
            kv[plan.pages, layer, 1, plan.offsets] = rows.v_TGD
        out = torch.empty_like(rows.q_THD, memory_format=torch.contiguous_format)
        for request in plan.requests:
            # SDPA takes [1, heads, tokens, D].
            q = rows.q_THD[request.rows].transpose(0, 1).unsqueeze(0)
            k = kv[request.pages, layer, 0, request.offsets].transpose(0, 1).unsqueeze(0)
            v = kv[request.pages, layer, 1, request.offsets].transpose(0, 1).unsqueeze(0)
            k, v, nonfinite_T = zero_nonfinite(k, v, request.mask)
            mask = request.mask
            if rows.sinks_H is not None:
                k, v, mask = _with_sinks(k, v, mask, rows.sinks_H)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rows.scale, enable_gqa=True)
            out[request.rows] = mark_nonfinite_rows(attended[0].transpose(0, 1), nonfinite_T)
        return out


def zero_nonfinite(k: Tensor, v: Tensor, mask_TS: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Set non-finite tokens of k and v [1, heads, S, D] to 0. Also returns which rows [T] see one, if any. Without
    `mask_TS`, row i sees keys 0 to i.

    A mask alone does not hide such a token: its score plus minus infinity, and its value times 0, are NaN.
    """
    if k.shape[2] == 1 or (mask_TS is not None and len(mask_TS) == 1):  # every row sees all keys
        return k, v, None
    sums_S = k.sum(dim=(0, 1, 3), dtype=torch.float32) + v.sum(dim=(0, 1, 3), dtype=torch.float32)
    bad_S = ~sums_S.isfinite()
    # On a GPU, `any` would wait for earlier kernels.
    if bad_S.device.type == "cpu" and not bad_S.any():
        return k, v, None
    bad_S1 = bad_S[:, None]
    nonfinite_T = bad_S.cumsum(dim=0) > 0 if mask_TS is None else (mask_TS & bad_S).any(dim=1)
    return k.masked_fill(bad_S1, 0.0), v.masked_fill(bad_S1, 0.0), nonfinite_T


def mark_nonfinite_rows(out_THD: Tensor, nonfinite_T: Tensor | None) -> Tensor:
    return out_THD if nonfinite_T is None else out_THD.masked_fill(nonfinite_T[:, None, None], torch.nan)


def _with_sinks(k: Tensor, v: Tensor, mask: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key of score 0 and value 0, to which the mask adds the sink."""
    rows, keys = mask.shape
    added = torch.zeros(1, len(sinks_H), rows, keys + 1, dtype=k.dtype, device=k.device)
    added[..., :keys].masked_fill_(~mask, -torch.inf)
    added[..., keys] = sinks_H[:, None].to(k.dtype)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), added


def _make_plan(kv: Tensor, batch: AttnBatch, window: int | None) -> _Plan:
    page_size, device = kv.shape[3], kv.device
    counts = np.diff(batch.query_start)
    owner = np.repeat(np.arange(len(counts)), counts)
    row_pages = _pages(batch.page_table, owner, batch.positions, page_size)
    if row_pages.size and not (row_pages.min() > 0 and row_pages.max() < kv.shape[0]):
        raise slot_error()
    requests = []
    for r, (start, end) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True)):
        if start == end:
            continue
        positions = batch.positions[start:end]
        # A NaN in an earlier, unwritten slot would survive a mask.
        first = 0 if window is None else max(int(positions[0]) - window + 1, 0)
        keys = np.arange(first, int(positions[-1]) + 1)
        pages = _pages(batch.page_table, np.full(len(keys), r), keys, page_size)
        if not (pages.min() > 0 and pages.max() < kv.shape[0]):
            raise slot_error()
        mask = keys[None, :] <= positions[:, None]
        if window is not None:
            mask &= keys[None, :] > positions[:, None] - window
        requests.append(
            _Request(
                rows=slice(int(start), int(end)),
                pages=_index(pages, device),
                offsets=_index(keys % page_size, device),
                mask=torch.from_numpy(mask).to(device),
            )
        )
    return _Plan(_index(row_pages, device), _index(batch.positions % page_size, device), requests)


def _pages(page_table: np.ndarray, owner: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    columns = positions // page_size
    if columns.size and columns.max() >= page_table.shape[1]:
        raise slot_error()
    pages: np.ndarray = page_table[owner, columns]
    return pages


def _index(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)

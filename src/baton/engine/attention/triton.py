"""Paged attention on CUDA devices in one Triton kernel, in place.

A program attends some rows of one request, with all query heads of one KV head, over tiles of keys at absolute
multiples of the tile size, with an online softmax (Milakov and Gimelshein, arXiv:1805.02867; tiles as in
FlashAttention-2, arXiv:2307.08691). Batch-invariant: tiles have one shape, and a tile in which a row sees no key does
not change the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.errors import ConfigError
from baton.models.layer_cache import AttnRows, slot_error

# Rows times query heads per KV head in one program, and keys in one tile.
_BLOCK_M = 64
_BLOCK_N = 64
# Above this many bytes per head, fewer keys fit into a multiprocessor's memory.
_WIDE_BYTES = 256
_NARROW_N = 32
_WARPS = 4


@dataclass(frozen=True, slots=True)
class _Plan:
    """A batch's indices on the device, for all layers with one page size and number of query heads per KV head. `tiles`
    int32 [programs, 2]: a request, and its first row that the program attends.
    """

    query_start: Tensor
    positions: Tensor
    page_table: Tensor
    slots: Tensor
    tiles: Tensor


class TritonBackend:
    name = "triton"
    batch_invariant = True

    def __init__(self) -> None:
        try:
            from baton.kernels.triton import paged_attention as kernels
        except ImportError as error:
            raise ConfigError("attention_backend", f"triton is not installed: {error}") from error
        self._kernels: Any = kernels

    def write_and_attend(self, kv: Tensor, layer: int, rows: AttnRows, batch: AttnBatch, window: int | None) -> Tensor:
        q_THD, k_TGD, v_TGD, sinks_H = rows.q_THD, rows.k_TGD, rows.v_TGD, rows.sinks_H
        num_rows, num_heads, head_dim = q_THD.shape
        page_size, num_kv_heads = kv.shape[3], kv.shape[4]
        group = num_heads // num_kv_heads
        plan = batch.plan(("triton", kv.shape, group), lambda: _make_plan(kv, batch, group))
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q_THD.dtype, device=q_THD.device)
        if not num_rows:
            return out
        kept = kv[:, layer]
        if k_TGD is not None and v_TGD is not None:
            self._kernels.write[num_rows, num_kv_heads](
                kept, k_TGD, v_TGD, plan.slots,
                *kept.stride()[:4], *k_TGD.stride()[:2], *v_TGD.stride()[:2],
                PAGE=page_size, D=head_dim, BLOCK_D=_power_of_two(head_dim),
            )  # fmt: skip
        wide = head_dim * kv.element_size() > _WIDE_BYTES
        self._kernels.attend[len(plan.tiles), num_kv_heads](
            q_THD, kept, out, plan.page_table, plan.tiles, plan.query_start, plan.positions,
            sinks_H if sinks_H is not None else plan.positions, rows.scale, window or 0,
            *q_THD.stride()[:2], *kept.stride()[:4], plan.page_table.stride(0), *out.stride()[:2],
            PAGE=page_size, GROUP=group, D=head_dim, BLOCK_D=_power_of_two(head_dim),
            BLOCK_M=_block_m(group), BLOCK_N=_NARROW_N if wide else _BLOCK_N,
            HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None,
            num_warps=_WARPS, num_stages=2,
        )  # fmt: skip
        return out


def _power_of_two(number: int) -> int:
    # `tl.dot` needs at least 16 columns.
    return max(16, 1 << (number - 1).bit_length())


def _block_m(group: int) -> int:
    return max(_BLOCK_M, _power_of_two(group))


def _make_plan(kv: Tensor, batch: AttnBatch, group: int) -> _Plan:
    page_size, device = kv.shape[3], kv.device
    counts = np.diff(batch.query_start)
    owner = np.repeat(np.arange(len(counts)), counts)
    columns = batch.positions // page_size
    if columns.size and columns.max() >= batch.page_table.shape[1]:
        raise slot_error()
    pages = batch.page_table[owner, columns].astype(np.int64)
    if pages.size and not (pages.min() > 0 and pages.max() < kv.shape[0]):
        raise slot_error()
    rows = max(1, _block_m(group) // group)
    tiles = [
        (request, first)
        for request, (start, stop) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True))
        for first in range(int(start), int(stop), rows)
    ]
    slots = pages * page_size + batch.positions % page_size
    return _Plan(
        _on(batch.query_start.astype(np.int32), device),
        _on(batch.positions.astype(np.int64), device),
        _on(batch.page_table.astype(np.int32), device),
        _on(slots, device),
        _on(np.array(tiles, dtype=np.int32).reshape(-1, 2), device),
    )


def _on(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)

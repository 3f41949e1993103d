"""Paged attention on the CPU, in place: see `kernels.cpu.attention.paged`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.errors import ConfigError
from baton.kernels.cpu.attention.paged import ATTEND, FAULT, WRITE
from baton.kernels.cpu.omp import arguments, float_bits, threads_for
from baton.kernels.cpu.tiles import may_use_tiles
from baton.models.layer_cache import AttnRows, slot_error

# Multiply-adds worth one more thread.
_PARALLEL_WORK = 1 << 17


@dataclass(frozen=True, slots=True)
class BatchAddresses:
    """Addresses of a batch's arrays, for all layers of a forward. Keeps the arrays alive."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    addresses: tuple[int, int, int]
    # Upper bound on (row, visible key) pairs.
    num_pairs: int

    @classmethod
    def of(cls, batch: AttnBatch) -> BatchAddresses:
        return batch.plan("addresses", lambda: cls._make(batch))

    @classmethod
    def _make(cls, batch: AttnBatch) -> BatchAddresses:
        arrays = (
            np.ascontiguousarray(batch.positions, dtype=np.int64),
            np.ascontiguousarray(batch.query_start, dtype=np.int32),
            np.ascontiguousarray(batch.page_table, dtype=np.int32),
        )
        positions, query_start, page_table = (int(array.ctypes.data) for array in arrays)
        num_pairs = int(arrays[0].sum()) + arrays[0].size
        return cls(arrays, (positions, query_start, page_table), num_pairs)


class PagedCpuBackend:
    """For float32 and bfloat16. Computes in float32 without the GIL. The number of threads changes no result."""

    name = "paged_cpu"
    batch_invariant = True

    def write_and_attend(self, kv: Tensor, layer: int, rows: AttnRows, batch: AttnBatch, window: int | None) -> Tensor:
        if kv.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError("dtype", f"paged_cpu attends in float32 or bfloat16, not {kv.dtype}")
        if not kv.is_contiguous():
            raise ConfigError("kv", "paged_cpu needs a contiguous region")
        where = BatchAddresses.of(batch)
        num_rows, heads, size = rows.q_THD.shape
        q, k, v, width = _side_by_side(rows, kv.dtype)
        sinks = None if rows.sinks_H is None else rows.sinks_H.float().contiguous()
        out = torch.empty(num_rows, heads, size, dtype=kv.dtype)
        num_pages, num_layers, _, page_size, kv_heads, _ = kv.shape
        given = arguments(
            0,
            num_rows,
            len(where.arrays[1]) - 1,
            where.arrays[2].shape[1],
            width,
            kv.data_ptr(),
            num_pages,
            num_layers,
            page_size,
            kv_heads,
            size,
            layer,
            heads // kv_heads,
            window or 0,
            float_bits(rows.scale),
            *where.addresses,
            q.data_ptr(),
            0 if k is None else k.data_ptr(),
            0 if v is None else v.data_ptr(),
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            may_use_tiles(),
        )
        narrow = kv.dtype == torch.bfloat16
        if k is not None:
            WRITE[narrow].call_inline(given)
        if not given[FAULT]:
            ATTEND[narrow].call(given, threads_for(where.num_pairs * heads * size, _PARALLEL_WORK))
        if given[FAULT]:
            raise slot_error()
        return out.to(rows.q_THD.dtype)


def _side_by_side(rows: AttnRows, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """q, k and v as parts of one tensor's rows, and the elements from row to row. Copies unless they come from one
    joint projection.
    """
    q = rows.q_THD.to(dtype)
    if rows.k_TGD is None or rows.v_TGD is None:
        return q.contiguous(), None, None, q.shape[1] * q.shape[2]
    k, v = rows.k_TGD.to(dtype), rows.v_TGD.to(dtype)
    width, size = q.stride(0), q.shape[2]
    if all(tensor.stride() == (width, size, 1) for tensor in (q, k, v)):
        return q, k, v, width
    joined = torch.cat((q, k, v), dim=1)
    heads, kv_heads = q.shape[1], k.shape[1]
    return joined, joined[:, heads:], joined[:, heads + kv_heads :], joined.stride(0)

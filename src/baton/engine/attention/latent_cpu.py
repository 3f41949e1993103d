"""Absorbed latent attention on the CPU, in place: see `kernels.cpu.attention.latent`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.paged_cpu import BatchAddresses
from baton.kernels.cpu.attention.latent import ATTEND, FAULT
from baton.kernels.cpu.omp import arguments, float_bits, threads_for
from baton.models.layer_cache import slot_error

# Vectors (rows times heads) that share one load of a tile: queries and sums fit in a core's cache.
_VECTORS = 128
# Multiply-adds worth one more thread.
_PARALLEL_WORK = 1 << 24


def attend_latents(
    planes: Sequence[Tensor], layer: int, q_THW: Tensor, latent_dim: int, scale: float, batch: AttnBatch
) -> Tensor:
    """Weighted sums of latents [T, H, C] in the dtype of q and of the one or two planes, float32 or bfloat16. Raises
    `BatonError` for a bad slot.
    """
    num_rows, heads, width = q_THW.shape
    query, out = q_THW.contiguous(), torch.empty(num_rows, heads, latent_dim, dtype=q_THW.dtype)
    if not num_rows:
        return out
    where = BatchAddresses.of(batch)
    threads = threads_for(where.num_pairs * heads * width, _PARALLEL_WORK)
    longest = int(np.diff(batch.query_start).max()) * heads
    first, second = _layout(planes[0]), _layout(planes[1]) if len(planes) > 1 else (planes[0].data_ptr(), 0, 0, 0, 0)
    given = arguments(
        0,
        num_rows,
        len(batch.query_start) - 1,
        batch.page_table.shape[1],
        layer,
        heads,
        width,
        latent_dim,
        *planes[0].shape[:3],
        # Threads share even a single request.
        min(_VECTORS, max(4, -(-longest // threads))),
        float_bits(scale),
        *where.addresses,
        query.data_ptr(),
        out.data_ptr(),
        *first,
        *second,
    )
    ATTEND[q_THW.dtype == torch.bfloat16].call(given, threads)
    if given[FAULT]:
        raise slot_error()
    return out


def _layout(plane: Tensor) -> tuple[int, ...]:
    """Address, width, strides in bytes of a plane [pages, layers, page_size, 1, width]."""
    page, layer, row = (stride * plane.itemsize for stride in plane.stride()[:3])
    return plane.data_ptr(), plane.shape[4], page, layer, row

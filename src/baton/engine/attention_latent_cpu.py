"""Absorbed latent attention on the CPU: reads latents where they lie. See `attention_latent_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention import AttnBatch, slot_error
from baton.engine.attention_latent_kernels import attend
from baton.models.cpu_kernels import array

# Vectors that share one load of a tile; their queries and sums stay in a core's cache.
_VECTORS = 128
# Multiply-adds below which starting a second thread costs more than it saves.
_PARALLEL_WORK = 1 << 23


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="latents")


def absorbed(
    planes: Sequence[Tensor], layer: int, q_THW: Tensor, latent_dim: int, scale: float, batch: AttnBatch
) -> Tensor:
    """Sums of latents [T, H, C] in q's dtype, float32 or bfloat16 like the planes. Raises `BatonError` for a bad
    slot."""
    num_rows, heads, width = q_THW.shape
    out = torch.empty(num_rows, heads, latent_dim, dtype=q_THW.dtype)
    if not num_rows:
        return out
    longest = int(np.diff(batch.query_start).max()) * heads
    work = num_rows * heads * width * int(batch.positions.mean() + 1)
    parts = torch.get_num_threads() if work >= _PARALLEL_WORK else 1
    # A lone request is cut as well.
    step = min(_VECTORS, max(4, -(-longest // parts)))
    vectors_in = array(q_THW.contiguous()).reshape(-1, width)
    vectors_out = array(out).reshape(-1, latent_dim)
    where = (batch.positions, batch.query_start, batch.page_table)
    kept = tuple(array(plane) for plane in planes)
    arguments = (kept, layer, vectors_in, vectors_out, *where, np.float32(scale), step)
    # The other threads begin first, and every one is waited for, also after one has failed: they write into `out`.
    jobs = [_threads(parts).submit(attend, *arguments, part, parts) for part in range(1, parts)]
    fine = attend(*arguments, 0, parts)
    if False in [fine, *[job.result() for job in jobs]]:
        raise slot_error()
    return out

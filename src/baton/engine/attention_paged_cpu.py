"""Paged attention on the CPU: reads pages where they lie, and gives every row the same bits in every batch.

The arithmetic, and why it is batch-invariant, is in `attention_paged_kernels`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention import AttnBatch, slot_error
from baton.engine.attention_paged_kernels import attend, write
from baton.errors import ConfigError

# Multiply-adds below which starting a second thread costs more than it saves.
_PARALLEL_WORK = 1 << 23
_NO_SINKS = np.empty(0, np.float32)


class PagedCpuBackend:
    """See `AttentionBackend`. float32 and bfloat16; arithmetic in float32; releases the GIL.

    Large steps are split over as many threads as torch may use, which changes no result.
    """

    name = "paged_cpu"
    batch_invariant = True

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    def write_and_attend(
        self,
        kv: Tensor,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        scale: float,
        batch: AttnBatch,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        narrow = kv.dtype == torch.bfloat16
        if not narrow and kv.dtype != torch.float32:
            raise ConfigError("dtype", f"paged_cpu attends in float32 or bfloat16, not {kv.dtype}")
        if not kv.is_contiguous():
            raise ConfigError("kv", "paged_cpu needs a contiguous region")
        region, k, v = _array(kv, narrow), _array(k_TGD, narrow), _array(v_TGD, narrow)
        where = (batch.positions, batch.query_start, batch.page_table)
        if not write(region, layer, k, v, *where):
            raise slot_error()
        query = _array(q_THD.to(kv.dtype), narrow)
        out = torch.empty(q_THD.shape, dtype=kv.dtype)
        sinks = _NO_SINKS if sinks_H is None else _array(sinks_H.float(), narrow=False)
        arguments = (region, layer, query, _array(out, narrow), *where, np.float32(scale), window or 0, sinks)
        parts = self._parts(batch, query.size)
        # The other threads begin first, and every one is waited for, also after one has failed: they write into `out`.
        jobs = [self._threads(parts).submit(attend, *arguments, part, parts) for part in range(1, parts)]
        fine = attend(*arguments, 0, parts)
        if False in [fine, *[job.result() for job in jobs]]:
            raise slot_error()
        return out.to(q_THD.dtype)

    def _parts(self, batch: AttnBatch, query_size: int) -> int:
        threads = torch.get_num_threads()
        if threads == 1 or not len(batch.positions):
            return 1
        work = query_size * int(batch.positions.mean() + 1)
        return threads if work >= _PARALLEL_WORK else 1

    def _threads(self, count: int) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(count, thread_name_prefix="attention")
            return self._pool


def _array(tensor: Tensor, narrow: bool) -> Any:
    """A numpy view: bfloat16 as its bits. Copies where it must."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint16).numpy() if narrow else tensor.numpy()

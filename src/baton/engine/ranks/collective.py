"""Collectives between ranks: gloo over loopback, with a private file store."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.models.layers.expert_parallel import ExpertRanks
from baton.models.layers.parallel import Stage, TensorRank

# Long, since a dead rank is noticed at once anyway.
TIMEOUT = timedelta(minutes=10)


class Exchange:
    """Constructed once all `size` ranks are."""

    def __init__(self, store: str, rank: int, size: int) -> None:
        # By default gloo binds the address of the host name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._size = size
        # Not the default group: a process may have several engines.
        library: Any = dist
        self._group = library.ProcessGroupGloo(library.FileStore(store, size), rank, size, TIMEOUT)

    def gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """Each rank's tensor, by rank; any dtype."""
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        as_bytes = [part.view(-1).view(torch.uint8) for part in parts]
        self._group.allgather([as_bytes], [own.view(-1).view(torch.uint8)]).wait()
        return parts

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """`parts[r]` (uint8) goes to rank r. Returns the part from each rank, of `sizes` bytes."""
        came = torch.empty(sum(sizes), dtype=torch.uint8)
        own = torch.cat(list(parts))
        self._group.alltoall_base(came, own, list(sizes), [len(part) for part in parts]).wait()
        return torch.split(came, list(sizes))

    def send(self, tensor: Tensor, to: int) -> None:
        self._group.send([tensor.contiguous().view(-1).view(torch.uint8)], to, 0).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        self._group.recv([tensor.view(-1).view(torch.uint8)], source, 0).wait()


def expert_ranks(config: EngineConfig, store: str) -> ExpertRanks:
    """Connects at the first exchange; only models with experts have one."""
    rank, size = config.data_parallel_rank, config.data_parallel_size
    exchange = functools.cache(lambda: Exchange(store, rank, size))
    return ExpertRanks(
        rank, size, lambda tensor: exchange().gather(tensor), lambda parts, sizes: exchange().all_to_all(parts, sizes)
    )


def connect_ranks(config: EngineConfig, store: str, rank: int) -> TensorRank:
    """Waits for all. Ranks are numbered stage by stage. Tensor rank t exchanges layer outputs with tensor rank t of the
    other stages, and sums within its stage.
    """
    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    index, number = divmod(rank, size)
    stage = Stage()
    if stages > 1:
        line = Exchange(f"{store}-line-{number}", index, stages)
        stage = Stage(index, stages, line.send, line.receive)
    if size == 1:
        return TensorRank(num_slices=config.num_slices, stage=stage)
    sums = Exchange(f"{store}-sums-{index}", number, size)
    return TensorRank(number, size, config.num_slices, sums.gather, stage)

"""How ranks exchange partial sums, and stages what leaves their layers: by gloo over loopback, with a store in files
that only they can read."""

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
from baton.models.expert_parallel import ExpertRanks
from baton.models.parallel import Stage, TensorRank

# A rank that is paused for longer has hung. One that has died is seen at once.
TIMEOUT = timedelta(minutes=10)


class Exchange:
    """One rank's end of an exchange among `size`. Constructing it waits for all the others."""

    def __init__(self, store: str, rank: int, size: int) -> None:
        # Without it gloo binds the address of the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._size = size
        # Not the process's default group: there may be several engines in it.
        library: Any = dist
        self._group = library.ProcessGroupGloo(library.FileStore(store, size), rank, size, TIMEOUT)

    def gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """Every rank's tensor; bytes travel, so any dtype does."""
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        as_bytes = [part.view(-1).view(torch.uint8) for part in parts]
        self._group.allgather([as_bytes], [own.view(-1).view(torch.uint8)]).wait()
        return parts

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Send each rank its part, uint8, and return the parts of all ranks, whose `sizes` in bytes are known."""
        came = torch.empty(sum(sizes), dtype=torch.uint8)
        own = torch.cat(list(parts))
        self._group.alltoall_base(came, own, list(sizes), [len(part) for part in parts]).wait()
        return torch.split(came, list(sizes))

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to the rank of that number, which calls `receive`."""
        self._group.send([tensor.contiguous().view(-1).view(torch.uint8)], to, 0).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a tensor with what that rank sends."""
        self._group.recv([tensor.view(-1).view(torch.uint8)], source, 0).wait()


def expert_ranks(config: EngineConfig, store: str) -> ExpertRanks:
    """This process's place among data-parallel ranks, which meet in their first round: without experts never."""
    rank, size = config.data_parallel_rank, config.data_parallel_size
    exchange = functools.cache(lambda: Exchange(store, rank, size))
    return ExpertRanks(
        rank, size, lambda tensor: exchange().gather(tensor), lambda parts, sizes: exchange().swap(parts, sizes)
    )


def tensor_rank(config: EngineConfig, store: str, rank: int) -> TensorRank:
    """This process's place among the ranks, once all are there. Ranks are counted stage by stage; rank t of a stage
    exchanges layers' outputs with rank t of the others, and sums with its own stage."""
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

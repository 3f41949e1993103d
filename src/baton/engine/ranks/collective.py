"""How tensor ranks exchange partial sums: gloo over loopback, found by a file that only they can read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baton.models.parallel import TensorRank

# A rank that is paused for longer has hung. One that has died is seen at once.
TIMEOUT = timedelta(minutes=10)


class Exchange:
    """One rank's end. Constructing it waits for all the others."""

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


def tensor_rank(store: str, rank: int, size: int, num_slices: int) -> TensorRank:
    """This process's place among the ranks, once all are there."""
    if size == 1:
        return TensorRank(num_slices=num_slices)
    return TensorRank(rank, size, num_slices, Exchange(store, rank, size).gather)

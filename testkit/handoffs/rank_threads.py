"""Tensor ranks as threads of one process, which exchange data at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from baton.models.layers.parallel import TensorRank

R = TypeVar("R")
LIMIT_S = 60.0


def on_ranks(size: int, num_slices: int, call: Callable[[TensorRank], R]) -> list[R]:
    """The results of `call` on each rank. Raises the exception of the first rank that raises."""
    barrier = threading.Barrier(size)
    shown: list[Tensor | None] = [None] * size

    def gather_as(rank: int) -> Callable[[Tensor], Sequence[Tensor]]:
        def gather(tensor: Tensor) -> Sequence[Tensor]:
            shown[rank] = tensor
            barrier.wait(LIMIT_S)
            parts = [part.clone() for part in shown if part is not None]
            barrier.wait(LIMIT_S)
            assert len({part.shape for part in parts}) == 1, "ranks exchange unlike things"
            return parts

        return gather

    def run(rank: int) -> R:
        try:
            return call(TensorRank(rank, size, num_slices, gather_as(rank)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in found if (error := future.exception()) is not None]
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (first or errors)[0]
    return [future.result() for future in found]

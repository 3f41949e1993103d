"""Tensor ranks and pipeline stages as threads of one process."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from baton.models.layers.parallel import Stage, TensorRank

R = TypeVar("R")
LIMIT_S = 60.0


def on_ranks(size: int, num_slices: int, call: Callable[[TensorRank], R]) -> list[R]:
    """The results of `call` on each tensor rank. Raises the exception of the first rank that raises."""
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

    return _results(run, size, threading.BrokenBarrierError)


def on_stages(count: int, call: Callable[[TensorRank], R]) -> list[R]:
    """As `on_ranks`, of stages with one tensor rank each."""
    pairs = itertools.product(range(count), repeat=2)
    sent: dict[tuple[int, int], queue.Queue[Tensor | None]] = {pair: queue.Queue() for pair in pairs}

    def run(index: int) -> R:
        def send(tensor: Tensor, to: int) -> None:
            sent[index, to].put(tensor.clone())

        def receive(tensor: Tensor, source: int) -> None:
            got = sent[source, index].get(timeout=LIMIT_S)
            if got is None:
                raise _StageLostError
            assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), "stages exchange unlike things"
            tensor.copy_(got)

        try:
            return call(TensorRank(stage=Stage(index, count, send, receive)))
        except BaseException:
            for to in range(count):
                sent[index, to].put(None)
            raise

    return _results(run, count, _StageLostError)


class _StageLostError(Exception):
    """Another stage raised."""


def _results(run: Callable[[int], R], size: int, follows: type[Exception]) -> list[R]:
    """`follows`: what a thread raises because another has raised."""
    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in found if (error := future.exception()) is not None]
    first = [error for error in errors if not isinstance(error, follows)]
    if errors:
        raise (first or errors)[0]
    return [future.result() for future in found]

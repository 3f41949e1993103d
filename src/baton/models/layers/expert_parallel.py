"""Expert parallelism over data-parallel ranks (GShard, arXiv:2006.16668; attention data parallelism, DeepSeek-V3,
arXiv:2412.19437, 3.4): rows are sent to the ranks of their experts, and outputs come back.

Ranks communicate in collective *rounds* (docs/topologies.md, "Data parallelism").

Shapes: T rows, E hidden size, K experts chosen for a row, P (row, expert) pairs, W width of an expert's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.errors import ConfigError, EngineUnavailableError

# All-gather: the tensors of all ranks, in order.
Gather = Callable[[Tensor], Sequence[Tensor]]
# All-to-all: bytes for each rank, and how many to expect from each -> the bytes from each.
AllToAll = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
# Rows [T, E], and the row index and expert id of each pair, both [P] -> the experts' outputs [P, W].
ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]

_NO_LAYER = -1
_PAIR_BYTES = 8


class RemoteExpert(nn.Module):
    """An expert that another rank holds."""


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """One layer's experts. `make` computes this rank's; `width` is W."""

    make: ComputeExperts
    num_experts: int
    hidden: int
    width: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows [T, E] that one rank sends to another, with the index into these rows and the expert of each pair, [P]."""

    rows: Tensor
    places: Tensor
    experts: Tensor


class ExpertRanks:
    """One of `size` ranks, which hold equal numbers of a layer's experts, give or take one.

    `begun`: there was a round since the last `finish`. `begins` is called before the first round: the other ranks may
    not know of it yet. After a failed round every later one fails.
    """

    def __init__(self, rank: int, size: int, gather: Gather, all_to_all: AllToAll) -> None:
        self.rank, self.size = rank, size
        self.begun = False
        self.begins: Callable[[], None] = lambda: None
        self._gather, self._all_to_all = gather, all_to_all
        self._failure: str | None = None
        self._layers: list[SharedLayer] = []

    def local_experts(self, num_experts: int) -> range:
        """Raises `ConfigError` for fewer experts than ranks."""
        if num_experts < self.size:
            raise ConfigError("data_parallel_size", f"is {self.size}, and the model has {num_experts} experts")
        return range(self.rank * num_experts // self.size, (self.rank + 1) * num_experts // self.size)

    def add(self, layer: SharedLayer) -> int:
        """The layer's number, equal on all ranks if they add layers in the same order."""
        self._layers.append(layer)
        return len(self._layers) - 1

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def made(self, number: int, x_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """The outputs of each row's experts [T * K, W], by one round. Raises `EngineUnavailableError` if it fails."""
        layer = self._layers[number]
        starts = [rank * layer.num_experts // self.size for rank in range(1, self.size)]
        owners_TK = torch.bucketize(ids_TK, torch.tensor(starts, device=ids_TK.device), right=True)
        dispatched, of_rank = [], []
        for rank in range(self.size):
            theirs_TK = owners_TK == rank
            has_any_T = theirs_TK.any(dim=1)
            rows = theirs_TK.nonzero()[:, 0]
            dispatched.append(Dispatched(x_TE[has_any_T], (has_any_T.cumsum(0) - 1)[rows], ids_TK[theirs_TK]))
            of_rank.append(theirs_TK.flatten())
        self._begin()
        answers, _ = self._round(number, dispatched, 0)
        outputs = torch.empty(ids_TK.numel(), layer.width, dtype=layer.dtype, device=layer.device)
        for theirs, answer in zip(of_rank, answers, strict=True):
            outputs[theirs] = answer
        return outputs

    def finish(self, word: int) -> list[int]:
        """Join rounds until all ranks have called `finish`; returns the `word` of each. Raises as `made` does."""
        self._begin()
        while True:
            _, words = self._round(_NO_LAYER, [], word)
            if words is not None:
                self.begun = False
                return words

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            try:
                self.begins()
            except EngineUnavailableError as error:
                self._failure = str(error)
                raise

    def _round(self, number: int, dispatched: Sequence[Dispatched], word: int) -> tuple[list[Tensor], list[int] | None]:
        """The outputs for what this rank dispatches; or, if no rank dispatched anything, all ranks' words."""
        if self._failure is None:
            try:
                return self._run_round(number, dispatched, word)
            except Exception as error:
                self._failure = f"data-parallel ranks cannot go on: {type(error).__name__}: {error}"
                raise EngineUnavailableError(self._failure) from error
        raise EngineUnavailableError(self._failure)

    def _run_round(
        self, number: int, dispatched: Sequence[Dispatched], word: int
    ) -> tuple[list[Tensor], list[int] | None]:
        rows = [len(one.rows) for one in dispatched] or [0] * self.size
        pairs = [len(one.experts) for one in dispatched] or [0] * self.size
        heads = [head.tolist() for head in self._gather(torch.tensor([number, word, *rows, *pairs]))]
        if all(head[0] == _NO_LAYER for head in heads):
            return [], [head[1] for head in heads]
        received = self._dispatch(dispatched, heads)
        outputs = self._compute(received, heads)
        answers = self._combine(number, outputs, pairs)
        return answers, None

    def _dispatch(self, dispatched: Sequence[Dispatched], heads: Sequence[Sequence[int]]) -> dict[int, Dispatched]:
        """What each rank with rows sends to this one."""
        out, sizes = [_no_bytes()] * self.size, [0] * self.size
        for rank, one in enumerate(dispatched):
            if rank != self.rank and len(one.experts):
                out[rank] = _as_bytes(one)
        counts = {}
        for rank, head in enumerate(heads):
            if head[0] == _NO_LAYER:
                continue
            num_rows, num_pairs = head[2 + self.rank], head[2 + self.size + self.rank]
            counts[rank] = num_rows, num_pairs
            if rank != self.rank:
                layer = self._layers[head[0]]
                sizes[rank] = num_pairs * _PAIR_BYTES + num_rows * layer.hidden * layer.dtype.itemsize
        came = self._all_to_all(out, sizes)
        return {
            rank: dispatched[rank]
            if rank == self.rank
            else _from_bytes(came[rank], *counts[rank], self._layers[heads[rank][0]])
            for rank in counts
        }

    def _compute(self, received: dict[int, Dispatched], heads: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """The outputs [P, W] of this rank's experts for each rank with rows."""
        outputs: dict[int, Tensor] = {}
        for number in {heads[rank][0] for rank in received}:
            of_layer = {rank: one for rank, one in received.items() if heads[rank][0] == number}
            places, first = [], 0
            for one in of_layer.values():
                places.append(one.places + first)
                first += len(one.rows)
            rows = torch.cat([one.rows for one in of_layer.values()])
            experts = torch.cat([one.experts for one in of_layer.values()])
            parts = torch.split(
                self._layers[number].make(rows, torch.cat(places), experts), [len(each) for each in places]
            )
            outputs |= zip(of_layer, parts, strict=True)
        return outputs

    def _combine(self, number: int, made: dict[int, Tensor], pairs: Sequence[int]) -> list[Tensor]:
        out, sizes = [_no_bytes()] * self.size, [0] * self.size
        for rank, part in made.items():
            if rank != self.rank:
                out[rank] = part.cpu().contiguous().view(-1).view(torch.uint8)
        if number == _NO_LAYER:
            self._all_to_all(out, sizes)
            return []
        layer = self._layers[number]
        for rank in range(self.size):
            if rank != self.rank:
                sizes[rank] = pairs[rank] * layer.width * layer.dtype.itemsize
        came = self._all_to_all(out, sizes)
        return [
            made[rank] if rank == self.rank else _typed(came[rank], layer.dtype).view(-1, layer.width).to(layer.device)
            for rank in range(self.size)
        ]


def _no_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _as_bytes(one: Dispatched) -> Tensor:
    pairs = torch.stack((one.places, one.experts)).to(torch.int32).cpu()
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (pairs, one.rows.cpu())])


def _from_bytes(data: Tensor, num_rows: int, num_pairs: int, layer: SharedLayer) -> Dispatched:
    split = num_pairs * _PAIR_BYTES
    pairs, rows = data[:split], data[split:]
    places, experts = _typed(pairs, torch.int32).long().to(layer.device).view(2, num_pairs)
    return Dispatched(_typed(rows, layer.dtype).view(num_rows, layer.hidden).to(layer.device), places, experts)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Copied: a view needs aligned memory."""
    return data.clone().view(dtype)

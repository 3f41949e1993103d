"""Tensor and pipeline parallelism.

As in Megatron-LM (arXiv:1909.08053) projections into heads, or into an MLP's inner width, are cut by outputs; those
back by inputs, so each rank has a partial sum of every row.

Inputs are cut into `num_slices` slices, whose partial sums are added as one binary tree: any number of ranks that
divides `num_slices` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.errors import ConfigError
from baton.models.layers.expert_parallel import ExpertRanks, Gather

# Sends a tensor to a stage. Receives a tensor from a stage, in place.
SendTensor = Callable[[Tensor, int], None]
Receive = Callable[[Tensor, int], None]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part [start, start + length) of an axis of `total`."""

    start: int
    length: int
    total: int

    def times(self, size: int) -> Share:
        """The same part of an axis with `size` numbers for each one here."""
        return Share(self.start * size, self.length * size, self.total * size)


def _no_gather(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,)


def _no_send(tensor: Tensor, stage: int) -> None:
    raise AssertionError("a model of one stage exchanges nothing")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` pipeline stages, which share the layers in order (GPipe, arXiv:1811.06965). Stage 0 also has the
    embedding, the final norm and the LM head: the last stage sends back its output."""

    index: int = 0
    count: int = 1
    send: SendTensor = _no_send
    receive: Receive = _no_send

    def layers(self, num_layers: int) -> range:
        return stage_layers(num_layers, self.index, self.count)

    def of_layer(self, layer: int, num_layers: int) -> int:
        return next(i for i in range(self.count) if layer in stage_layers(num_layers, i, self.count))


def stage_layers(num_layers: int, index: int, count: int) -> range:
    """Equal numbers of layers, the remainder on the first stages. Raises `ConfigError` for fewer layers than stages."""
    if num_layers < count:
        raise ConfigError("pipeline_parallel_size", f"is {count}, and the model has {num_layers} layers")
    each, more = divmod(num_layers, count)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One of `size` tensor ranks of a pipeline stage.

    `gather`: an all-gather over them of tensors of one shape. `num_slices`: a power of two and a multiple of `size`.
    """

    rank: int = 0
    size: int = 1
    num_slices: int = 1
    gather: Gather = _no_gather
    stage: Stage = Stage()
    experts: ExpertRanks | None = None

    def share(self, total: int, what: str) -> Share:
        """This rank's equal part of `total`. Raises `ConfigError`, naming `what`, if it does not divide."""
        if total % self.size:
            raise ConfigError(
                "tensor_parallel_size", f"is {self.size}, which does not divide the model's {total} {what}"
            )
        length = total // self.size
        return Share(self.rank * length, length, total)

    def kv_heads(self, total: int) -> Share:
        """With fewer heads than ranks, several hold the same one. Raises `ConfigError`."""
        return share_of_heads(total, self.rank, self.size)

    def slices(self, total: int) -> int:
        """Slices of a rank's part of `total` inputs. Raises `ConfigError`."""
        if total % self.num_slices:
            why = f"is {self.num_slices}, which does not divide the model's {total} inputs of a projection"
            raise ConfigError("reduction_slices", why)
        return self.num_slices // self.size

    def add(self, partials: Sequence[Tensor]) -> Tensor:
        """The sum over all ranks' slices [T, N], in the same dtype."""
        if self.size == 1 and len(partials) == 1:
            return partials[0]
        own = partials[0] if len(partials) == 1 else tree_sum(partials)
        parts = self.gather(own)
        # Together the tree over all slices.
        return (tree_sum([part.float() for part in parts]) if len(parts) > 1 else own).to(partials[0].dtype)


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in float32 of 2^n tensors, as a binary tree, neighbours first."""
    level = [part.float() for part in parts]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


def share_of_heads(total: int, rank: int, size: int) -> Share:
    if total >= size and total % size == 0:
        return Share(rank * total // size, total // size, total)
    if total < size and size % total == 0:
        return Share(rank * total // size, 1, total)
    raise ConfigError("tensor_parallel_size", f"is {size}, which neither divides nor is a multiple of {total} KV heads")


SINGLE_RANK = TensorRank()

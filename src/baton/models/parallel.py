"""One model on several tensor ranks (Megatron-LM, arXiv:1909.08053): which part of a tensor a rank holds, and how the
ranks' partial sums become one.

Every rank computes the whole residual stream. A projection into heads, or into an MLP's inner width, is cut by its
outputs; the one back is cut by its inputs, so that each rank has a partial sum of every row.

Floating-point sums depend on their order. With `num_slices` inputs are cut into so many slices however many ranks there
are, and the partial sums of slices are added as one binary tree: any number of ranks that divides it gives the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.errors import ConfigError
from baton.models.expert_parallel import ExpertRanks, Gather

# To the stage of that number, and from it into the tensor.
SendTensor = Callable[[Tensor, int], None]
Receive = Callable[[Tensor, int], None]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of an axis of `total`: [start, start + length)."""

    start: int
    length: int
    total: int

    def times(self, size: int) -> Share:
        """The same of an axis with `size` numbers for each of these."""
        return Share(self.start * size, self.length * size, self.total * size)


def _alone(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,)


def _nowhere(tensor: Tensor, stage: int) -> None:
    raise AssertionError("a model of one stage exchanges nothing")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, which share the layers of a model in order (GPipe, arXiv:1811.06965). Stage 0 has the
    embedding too, and what is behind the last layer: the last stage's output comes back to it."""

    index: int = 0
    count: int = 1
    send: SendTensor = _nowhere
    receive: Receive = _nowhere

    def layers(self, num_layers: int) -> range:
        """Those of this stage. Raises `ConfigError` for fewer layers than stages."""
        return stage_layers(num_layers, self.index, self.count)


def stage_layers(num_layers: int, index: int, count: int) -> range:
    """The layers of one of `count` stages: equal numbers, and one more for each of the first where they do not divide.

    Raises `ConfigError` for fewer layers than stages.
    """
    if num_layers < count:
        raise ConfigError("pipeline_parallel_size", f"is {count}, and the model has {num_layers} layers")
    each, more = divmod(num_layers, count)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One rank's place among `size`. `gather` gives every rank's tensor of one shape, in the order of ranks: all ranks
    of its `stage` call it together. `num_slices` is a power of two and a multiple of `size`. `experts`: its place among
    data-parallel ranks, which share these."""

    rank: int = 0
    size: int = 1
    num_slices: int = 1
    gather: Gather = _alone
    stage: Stage = Stage()
    experts: ExpertRanks | None = None

    def share(self, total: int, what: str) -> Share:
        """An equal part of `total`. Raises `ConfigError` naming `what` cannot be cut."""
        if total % self.size:
            raise ConfigError(
                "tensor_parallel_size", f"is {self.size}, which does not divide the model's {total} {what}"
            )
        length = total // self.size
        return Share(self.rank * length, length, total)

    def kv_heads(self, total: int) -> Share:
        """Key-value heads; where there are fewer than ranks, several ranks hold the same one. Raises as `share`."""
        return share_of_heads(total, self.rank, self.size)

    def slices(self, total: int) -> int:
        """Into how many slices a rank's part of `total` inputs is cut. Raises `ConfigError`."""
        if total % self.num_slices:
            why = f"is {self.num_slices}, which does not divide the model's {total} inputs of a projection"
            raise ConfigError("reduction_slices", why)
        return self.num_slices // self.size

    def add(self, partials: Sequence[Tensor]) -> Tensor:
        """The sum over all ranks of their slices' partial sums [T, N], in their dtype."""
        if self.size == 1 and len(partials) == 1:
            return partials[0]
        own = partials[0] if len(partials) == 1 else tree(partials)
        parts = self.gather(own)
        # A tree over ranks on top of one tree per rank is the tree over all slices.
        return (tree([part.float() for part in parts]) if len(parts) > 1 else own).to(partials[0].dtype)


def tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of as many tensors as a power of two, in float32, neighbours first."""
    level = [part.float() for part in parts]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


def share_of_heads(total: int, rank: int, size: int) -> Share:
    """As `TensorRank.kv_heads`."""
    if total >= size and total % size == 0:
        return Share(rank * total // size, total // size, total)
    if total < size and size % total == 0:
        return Share(rank * total // size, 1, total)
    raise ConfigError("tensor_parallel_size", f"is {size}, which neither divides nor is a multiple of {total} KV heads")


ALONE = TensorRank()

"""The layout of one slot of a state layer (Mamba-2), and each tensor rank's part.

vLLM registers a slot as bytes: the last inputs of the convolution, for the channels x, B and C, then the recurrent
state of each head. Ranks share the heads with their channels of x, and the groups of B and C; a single group is
replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.kv.geometry import Geometry, Plane
from baton.kv.spec import Cut
from baton.vllm.groups import LayerGroup


@dataclass(frozen=True, slots=True)
class StatePart:
    """One plane of a slot: `num_heads` heads, or channels, of `head_dim` elements. `offset` from the slot's start and
    the strides are in bytes; `first_head`: the model's number of the first head here."""

    name: str
    dtype: torch.dtype
    cut: Cut
    num_heads: int
    head_dim: int
    first_head: int
    offset: int
    head_stride: int
    element_stride: int


@dataclass(frozen=True, slots=True)
class Mamba2State:
    """A Mamba-2 layer on tensor rank `rank`. `shapes` and `dtypes`: vLLM's, of the convolution's and of the recurrent
    state. `num_groups`: the model's; `groups_here`: this rank's; `state_size`: of a group. `channels_first`: the
    convolution's state is [channels, inputs], else [inputs, channels]."""

    rank: int
    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[torch.dtype]
    num_groups: int
    groups_here: int
    state_size: int
    channels_first: bool

    def parts(self) -> tuple[StatePart, ...]:
        """Raises `ConfigError` if the shapes are not a Mamba-2 layer's."""
        if [len(shape) for shape in self.shapes] != [2, 3]:
            raise ConfigError("model", f"a Mamba-2 state of shapes {list(self.shapes)} is not known")
        conv, (num_heads, *head) = self.shapes
        channels, inputs = conv if self.channels_first else reversed(conv)
        size = self.dtypes[0].itemsize
        strides = (inputs * size, size) if self.channels_first else (size, channels * size)
        of_groups = self.groups_here * self.state_size
        found, offset = [], 0
        cut: Cut = "channels" if self.num_groups > 1 else "whole"
        for name, number in (("conv.x", channels - 2 * of_groups), ("conv.B", of_groups), ("conv.C", of_groups)):
            shared: Cut = "channels" if name == "conv.x" else cut
            first = 0 if shared == "whole" else self.rank * number
            found.append(StatePart(name, self.dtypes[0], shared, number, inputs, first, offset, *strides))
            offset += number * strides[0]
        width, each = math.prod(head), self.dtypes[1].itemsize
        offset = channels * inputs * size
        first = self.rank * num_heads
        found.append(StatePart("ssm", self.dtypes[1], "heads", num_heads, width, first, offset, width * each, each))
        return tuple(found)


def slots(
    group: LayerGroup,
    tensors: Sequence[Tensor],
    region: int,
    parts: Sequence[Sequence[StatePart] | None],
    alone: bool,
) -> Geometry:
    """The geometry of the state layers of `group`.

    `tensors`: each layer's slots of bytes, at equal distances in region number `region`. `parts`: the layout of each
    layer's slots; None: unknown, so a slot is one opaque plane. `alone`: the engine has one tensor rank.

    Raises `ConfigError` if layers differ, and for an unknown layout with several tensor ranks.
    """
    first, own = tensors[0], parts[0]
    if any(other != own for other in parts):
        raise ConfigError("model", f"group {group.name!r}: states of several shapes")
    if own is None:
        if not alone:
            known = "states that are not Mamba-2's are handed off between engines of one tensor rank"
            raise ConfigError("tensor_parallel_size", known)
        size = first[0].nbytes
        own = [StatePart("state", torch.uint8, "whole", 1, size, 0, 0, size, 1)]
    base, slot = first.data_ptr() - first.untyped_storage().data_ptr(), first.stride(0) * first.element_size()
    return Geometry(
        group=group.name,
        region=region,
        region_bytes=first.untyped_storage().nbytes(),
        num_pages=first.shape[0],
        page_size=1,
        layer_ids=group.layer_ids,
        planes=tuple(
            Plane(
                name=part.name,
                dtype=dtype_name(part.dtype),
                cut=part.cut,
                num_heads=part.num_heads,
                head_dim=part.head_dim,
                layer_stride=layer_stride(tensors),
                page_stride=slot,
                token_stride=slot,
                head_stride=part.head_stride,
                element_stride=part.element_stride,
                first_head=part.first_head,
                base=base + part.offset,
            )
            for part in own
        ),
    )


def layer_stride(tensors: Sequence[Tensor]) -> int:
    first = tensors[0]
    if len(tensors) == 1:
        return first.stride(0) * first.element_size() * first.shape[0]
    return tensors[1].data_ptr() - first.data_ptr()


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in a `Plane`."""
    name = str(dtype).removeprefix("torch.")
    return "uint8" if name == "int8" else name

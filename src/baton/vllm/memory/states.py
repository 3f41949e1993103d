"""The layout of one slot of a state layer (Mamba-2, gated delta nets), and each tensor rank's part.

vLLM registers a slot as bytes: the last inputs of the convolution, then the recurrent state of each head. Mamba-2's
ranks share heads with their channels x, and groups of B and C, of which a single one is replicated; delta nets' ranks
q, k and v by heads.
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
from baton.vllm.memory.groups import LayerGroup

CHANNELS: Cut = "channels"


@dataclass(frozen=True, slots=True)
class StatePart:
    """One plane of a slot: `num_heads` heads, or channels, of `head_dim` elements. `offset` from the slot's start and
    strides are in bytes; `first_head`: the model's index of the first head here."""

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
        """Raises `ConfigError`."""
        of_groups = self.groups_here * self.state_size
        cut: Cut = "channels" if self.num_groups > 1 else "whole"
        behind: tuple[tuple[str, int, Cut], ...] = (("conv.B", of_groups, cut), ("conv.C", of_groups, cut))
        channels = _num_channels(self.shapes, self.channels_first)
        convolved = (("conv.x", channels - 2 * of_groups, "channels"), *behind)
        return _parts(convolved, self.rank, self.shapes, self.dtypes, self.channels_first)


@dataclass(frozen=True, slots=True)
class DeltaState:
    """As `Mamba2State`. `key_channels`: of q here, and of k."""

    rank: int
    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[torch.dtype]
    key_channels: int
    channels_first: bool

    def parts(self) -> tuple[StatePart, ...]:
        values = _num_channels(self.shapes, self.channels_first) - 2 * self.key_channels
        numbers = {"conv.q": self.key_channels, "conv.k": self.key_channels, "conv.v": values}
        convolved = tuple((name, number, CHANNELS) for name, number in numbers.items())
        return _parts(convolved, self.rank, self.shapes, self.dtypes, self.channels_first)


def _num_channels(shapes: Sequence[Sequence[int]], channels_first: bool) -> int:
    if [len(shape) for shape in shapes] != [2, 3]:
        raise ConfigError("model", f"a state of shapes {list(shapes)} is not known")
    return shapes[0][0 if channels_first else 1]


def _parts(
    convolved: Sequence[tuple[str, int, Cut]],
    rank: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    channels_first: bool,
) -> tuple[StatePart, ...]:
    """`convolved`: name, channels and cut of each part of the convolution's state."""
    conv, (num_heads, *head) = shapes
    channels, inputs = conv if channels_first else reversed(conv)
    size = dtypes[0].itemsize
    strides = (inputs * size, size) if channels_first else (size, channels * size)
    found, offset = [], 0
    for name, number, cut in convolved:
        first = 0 if cut == "whole" else rank * number
        found.append(StatePart(name, dtypes[0], cut, number, inputs, first, offset, *strides))
        offset += number * strides[0]
    width, each = math.prod(head), dtypes[1].itemsize
    offset, first = channels * inputs * size, rank * num_heads
    found.append(StatePart("ssm", dtypes[1], "heads", num_heads, width, first, offset, width * each, each))
    return tuple(found)


def state_geometry(
    group: LayerGroup,
    tensors: Sequence[Tensor],
    region: int,
    parts: Sequence[Sequence[StatePart] | None],
    alone: bool,
) -> Geometry:
    """`tensors`: each layer's slots of bytes, at equal distances in region number `region`. `parts`: the layout of each
    layer's slots; None: unknown, so a slot is one opaque plane. `alone`: the engine has one tensor rank.

    Raises `ConfigError`.
    """
    first, own = tensors[0], parts[0]
    if any(other != own for other in parts):
        raise ConfigError("model", f"group {group.name!r}: states of several shapes")
    if own is None:
        if not alone:
            known = "of states only those of Mamba-2 and of Qwen's delta nets are cut over tensor ranks"
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
    name = str(dtype).removeprefix("torch.")
    return "uint8" if name == "int8" else name

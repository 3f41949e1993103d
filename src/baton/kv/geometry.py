"""Memory layout of one group's KV cache on one rank, and the byte runs of copies.

A plane has five axes with byte strides (layer, page, token, head, element). Block-major, layer-major, NHD, HND, head
shards and pipeline stages differ only in strides, counts and ids, so one planner serves all. A group in several regions
(such as one tensor per layer) has several geometries with disjoint `layer_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from baton.errors import ProtocolError
from baton.kv.spec import ITEMSIZE, MAX_PLANES, Cut, GroupSpec

Int64Array = NDArray[np.int64]
Axis = Literal["layer", "page", "plane", "token", "head", "element"]

BLOCK_MAJOR_NHD: tuple[Axis, ...] = ("page", "layer", "plane", "token", "head", "element")
LAYER_MAJOR_NHD: tuple[Axis, ...] = ("layer", "plane", "page", "token", "head", "element")

NULL_PAGE = 0
# Offsets, int64 sums of a few products, must not overflow.
_MAX_BYTES = 1 << 60
_MAX_COUNT = 1 << 16


class Plane(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """The layout of one tensor (K, V, a latent, a part of a state). Strides and `base` are in bytes.

    Element (layer, page, token, head, e) is at `base` + the sum of index times stride. `cut`: the axis that is sharded
    over ranks: `heads`, `channels` (a head is one channel), or `whole` (replicated). `first_head`: the model's number
    of the first head on this rank.

    With `tile` > 1, `tile` successive tokens of one head form one opaque contiguous block, as in CPU attention kernels.
    `token_stride` is then the distance between tiles divided by `tile`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[ -~]*\Z")]
    dtype: str
    cut: Cut
    num_heads: int
    head_dim: int
    layer_stride: int
    page_stride: int
    token_stride: int
    head_stride: int
    element_stride: int
    first_head: int = 0
    base: int = 0
    tile: int = 1

    @property
    def last_head(self) -> int:
        return self.first_head + self.num_heads

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.itemsize


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """The layout of one group in one registered region. `layer_ids`: layer numbers of the model, in storage order."""

    group: str
    region: int
    region_bytes: int
    num_pages: int
    page_size: int
    layer_ids: tuple[int, ...]
    planes: Annotated[tuple[Plane, ...], Meta(max_length=MAX_PLANES)]

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def tile(self) -> int:
        """The smallest number of tokens that can be copied on their own in every plane."""
        return math.lcm(*(plane.tile for plane in self.planes))

    def check(self) -> Geometry:
        """Returns self. Raises `ProtocolError`."""
        need = self._need
        need(1 <= len(self.planes) <= MAX_PLANES, f"there must be 1 to {MAX_PLANES} planes")
        need(len({plane.name for plane in self.planes}) == len(self.planes), "names of planes must differ")
        # The planner allocates arrays of these sizes, and a peer may have sent them.
        need(min(self.num_layers, self.num_pages, self.page_size) >= 1, "every count must be at least 1")
        need(max(self.num_layers, self.page_size) <= _MAX_COUNT, f"a count is above {_MAX_COUNT}")
        need(self.region >= 0, "indices must not be negative")
        need(len(set(self.layer_ids)) == self.num_layers, "layer_ids must differ")
        need(0 < self.region_bytes <= _MAX_BYTES, "region_bytes out of range")
        for plane in self.planes:
            self._check_plane(plane)
        for index, plane in enumerate(self.planes):
            for other in self.planes[:index]:
                need(self._are_disjoint(plane, other), f"planes {other.name!r} and {plane.name!r} overlap")
        return self

    def _need(self, ok: bool, what: str) -> None:
        if not ok:
            raise ProtocolError(f"geometry of group {self.group!r}: {what}")

    def _check_plane(self, plane: Plane) -> None:
        need = self._need
        need(plane.dtype in ITEMSIZE, f"unknown dtype {plane.dtype!r}")
        need(min(plane.num_heads, plane.head_dim, plane.tile) >= 1, "every count must be at least 1")
        sparse = plane.head_dim if plane.element_stride != plane.itemsize else 1
        need(max(plane.num_heads, sparse) <= _MAX_COUNT, f"a count is above {_MAX_COUNT}")
        need(self.page_size % plane.tile == 0, "page_size must be a multiple of tile")
        need(plane.base >= 0 and plane.first_head >= 0, "indices must not be negative")
        need(plane.cut != "whole" or plane.first_head == 0, "a plane that is not cut begins with head 0")
        extent, axes = self._axes(plane)
        # Each axis must step over everything inside it.
        for stride, count in sorted(axes):
            need(stride >= extent, "strides let elements overlap")
            extent += stride * (count - 1)
        need(plane.base + extent <= self.region_bytes, "elements lie outside the region")
        # The planner uses the stride even of an axis with one entry.
        strides = (plane.layer_stride, plane.page_stride, plane.token_stride, plane.head_stride, plane.element_stride)
        need(min(strides) >= 0 and max(strides) <= _MAX_BYTES, "strides out of range")

    def _axes(self, plane: Plane) -> tuple[int, list[tuple[int, int]]]:
        """Bytes of the smallest contiguous piece, and (stride, count) of every axis."""
        axes = [
            (plane.layer_stride, self.num_layers),
            (plane.page_stride, self.num_pages),
            (plane.token_stride * plane.tile, self.page_size // plane.tile),
            (plane.head_stride, plane.num_heads),
        ]
        piece = plane.itemsize
        if plane.tile > 1:
            piece *= plane.tile * plane.head_dim
        else:
            axes.append((plane.element_stride, plane.head_dim))
        return piece, [axis for axis in axes if axis[1] > 1]

    def _are_disjoint(self, one: Plane, other: Plane) -> bool:
        low, high = sorted((one, other), key=lambda plane: plane.base)
        low_piece, low_axes = self._axes(low)
        high_piece, high_axes = self._axes(high)
        low_axes.sort(reverse=True)
        high_axes.sort(reverse=True)
        distance = high.base - low.base
        for shared in range(min(len(low_axes), len(high_axes)) + 1):
            if low_axes[:shared] != high_axes[:shared]:
                return False
            low_end = _extent(low_piece, low_axes[shared:])
            high_end = distance + _extent(high_piece, high_axes[shared:])
            if low_end <= distance and _nested(high_end, reversed(low_axes[:shared])):
                return True
        return False

    @classmethod
    def from_order(
        cls,
        spec: GroupSpec,
        num_pages: int,
        order: tuple[Axis, ...],
        *,
        region: int = 0,
        first_head: int = 0,
        base: int = 0,
    ) -> Geometry:
        """A dense geometry with axes in `order`, outermost first, and planes of one shape."""
        if sorted(order) != sorted(BLOCK_MAJOR_NHD):
            raise ProtocolError(f"axis order must be a permutation of {BLOCK_MAJOR_NHD}, got {order}")
        one = spec.planes[0]
        if any((p.dtype, p.num_heads, p.head_dim) != (one.dtype, one.num_heads, one.head_dim) for p in spec.planes):
            raise ProtocolError(f"group {spec.name!r}: planes of several shapes lie in pages, layer by layer")
        counts: dict[Axis, int] = {
            "layer": spec.num_layers,
            "page": num_pages,
            "plane": len(spec.planes),
            "token": spec.page_size,
            "head": one.num_heads,
            "element": one.head_dim,
        }
        sizes = [counts[axis] for axis in order]
        stride = {axis: math.prod(sizes[i + 1 :]) * one.itemsize for i, axis in enumerate(order)}
        bases = [index * stride["plane"] for index in range(len(spec.planes))]
        return cls._dense(spec, num_pages, stride, bases, region, (first_head,) * len(spec.planes), base)

    @classmethod
    def block_major(
        cls, spec: GroupSpec, num_pages: int, *, region: int = 0, first_head: int | Sequence[int] = 0
    ) -> Geometry:
        """Baton's own pool: pages of layers of planes of `[page_size, num_heads, head_dim]`. `first_head`: of all
        sharded planes, or per plane."""
        *bases, layer_bytes = spec.plane_offsets
        stride: dict[Axis, int] = {"page": spec.page_bytes, "layer": layer_bytes}
        first_heads = (first_head,) * len(spec.planes) if isinstance(first_head, int) else first_head
        return cls._dense(spec, num_pages, stride, bases, region, first_heads, 0)

    @classmethod
    def _dense(
        cls,
        spec: GroupSpec,
        num_pages: int,
        stride: Mapping[Axis, int],
        bases: Sequence[int],
        region: int,
        first_heads: Sequence[int],
        base: int,
    ) -> Geometry:
        """Axes that are not in `stride` are packed inside the plane."""
        planes = tuple(
            Plane(
                name=plane.name,
                dtype=plane.dtype,
                cut=plane.cut,
                num_heads=plane.num_heads,
                head_dim=plane.head_dim,
                layer_stride=stride["layer"],
                page_stride=stride["page"],
                token_stride=stride.get("token", plane.token_bytes),
                head_stride=stride.get("head", plane.head_dim * plane.itemsize),
                element_stride=stride.get("element", plane.itemsize),
                first_head=0 if plane.cut == "whole" else first_head,
                base=base + offset,
            )
            for plane, offset, first_head in zip(spec.planes, bases, first_heads, strict=True)
        )
        return cls(
            group=spec.name,
            region=region,
            region_bytes=base + spec.page_bytes * num_pages,
            num_pages=num_pages,
            page_size=spec.page_size,
            layer_ids=spec.layer_ids,
            planes=planes,
        ).check()


def _nested(extent: int, axes: Iterable[tuple[int, int]]) -> bool:
    for stride, count in axes:
        if stride < extent:
            return False
        extent += stride * (count - 1)
    return True


def _extent(piece: int, axes: list[tuple[int, int]]) -> int:
    return piece + sum(stride * (count - 1) for stride, count in axes)


@dataclass(frozen=True, slots=True, eq=False)
class CopyList:
    """Byte runs from one region to another: int64 `[runs]`, sorted by destination and coalesced."""

    source_region: int
    dest_region: int
    source_offset: Int64Array
    dest_offset: Int64Array
    nbytes: Int64Array

    def __len__(self) -> int:
        return int(self.nbytes.size)

    @property
    def total(self) -> int:
        return int(self.nbytes.sum())

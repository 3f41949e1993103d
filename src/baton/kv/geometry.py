"""How the KV bytes of one group lie in memory on one rank, and the lists of byte runs that copies are made
of.

A `Geometry` is six axes with byte strides (layer, page, K/V half, token, head, element) over one registered
region. Block-major, layer-major, NHD, HND, head shards and pipeline stages differ only in their strides,
counts and identities, so that one planner serves them all. A group spread over several regions (say one
tensor per layer) is several geometries with disjoint `layer_ids`, planned one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.errors import ProtocolError
from baton.kv.interval import Kind, Rules

Int64Array = NDArray[np.int64]
Owner = Literal["target", "draft"]
Axis = Literal["layer", "page", "half", "token", "head", "element"]

BLOCK_MAJOR_NHD: tuple[Axis, ...] = ("page", "layer", "half", "token", "head", "element")
BLOCK_MAJOR_HND: tuple[Axis, ...] = ("page", "layer", "half", "head", "token", "element")
LAYER_MAJOR_NHD: tuple[Axis, ...] = ("layer", "half", "page", "token", "head", "element")
LAYER_MAJOR_HND: tuple[Axis, ...] = ("layer", "half", "page", "head", "token", "element")

NULL_PAGE = 0
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
# Offsets are int64 sums of a few products; staying far below 2**63 makes overflow impossible.
_MAX_BYTES = 1 << 60
_MAX_COUNT = 1 << 16


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group of layers on one rank: they share a block table, a kind, a page size and an owner.

    `num_kv_heads` counts the heads of this rank. `page_size` and `window` are in tokens. A `state` group has
    no token axis: its page is one state slot and its `page_size` is 1. `layer_ids` are the model's ids of the
    layers. `module` says on which tokens an entry depends (see `Rules`); it is 0 for the target's groups alone.

    Raises `ProtocolError` for values that describe no memory.
    """

    name: str
    owner: Owner
    kind: Kind
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    window: int | None
    layer_ids: tuple[int, ...]
    module: int | None = 0

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.page_size) < 1:
            raise ProtocolError(f"group {self.name!r}: every count must be at least 1")
        if self.dtype not in ITEMSIZE:
            raise ProtocolError(f"group {self.name!r}: unknown dtype {self.dtype!r}")
        if len(self.layer_ids) != self.num_layers or len(set(self.layer_ids)) != self.num_layers:
            raise ProtocolError(f"group {self.name!r}: layer_ids must name {self.num_layers} different layers")
        if (self.module == 0) != (self.owner == "target"):
            raise ProtocolError(f"group {self.name!r}: module 0 is the target, not module {self.module!r}")
        try:
            Rules(self.kind, self.module, self.window)
        except ProtocolError as error:
            raise ProtocolError(f"group {self.name!r}: {error}") from None
        if self.kind == "state" and self.page_size != 1:
            raise ProtocolError(f"group {self.name!r}: a state slot has no token axis, its page_size is 1")

    @property
    def rules(self) -> Rules:
        """What the group keeps, sends and may forget."""
        return Rules(self.kind, self.module, self.window)

    @property
    def num_halves(self) -> int:
        """2 where K and V are stored apart, 1 where a page holds one latent or state per layer."""
        return 1 if self.kind in ("mla", "state") else 2

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all its layers."""
        per_token = self.num_layers * self.num_halves * self.num_kv_heads * self.head_dim
        return per_token * self.page_size * self.itemsize


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where every element of one group lies in one region. Strides and `base` are in bytes.

    Element (layer, page, half, token, head, e) is at `base` + the sum of index times stride. `first_head` is
    the model's id of the first head held here, `layer_ids` the model's ids of the layers, in storage order.

    `tile` > 1 says that the elements of `tile` successive tokens of one head are stored as one opaque
    contiguous block (as CPU attention kernels do); `token_stride` is then a tile's distance divided by
    `tile`.
    """

    group: str
    region: int
    region_bytes: int
    num_pages: int
    page_size: int
    num_layers: int
    num_halves: int
    num_heads: int
    head_dim: int
    dtype: str
    layer_stride: int
    page_stride: int
    half_stride: int
    token_stride: int
    head_stride: int
    element_stride: int
    first_head: int
    layer_ids: tuple[int, ...]
    base: int = 0
    tile: int = 1

    @property
    def last_head(self) -> int:
        """One past the model's id of the last head held here."""
        return self.first_head + self.num_heads

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    def check(self) -> Geometry:
        """Return self when all elements lie in the region and none overlap, else raise `ProtocolError`."""

        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ProtocolError(f"geometry of group {self.group!r}: {what}")

        counts = (
            self.num_pages,
            self.page_size,
            self.num_layers,
            self.num_halves,
            self.num_heads,
            self.head_dim,
        )
        need(min(counts) >= 1 and self.tile >= 1, "every count must be at least 1")
        need(self.num_halves <= 2, "num_halves must be 1 or 2")
        # Planning sizes arrays by these, and they may be a peer's.
        sparse = self.head_dim if self.element_stride != ITEMSIZE.get(self.dtype) else 1
        most = max(self.num_layers, self.num_heads, self.page_size, sparse)
        need(most <= _MAX_COUNT, f"a count is above {_MAX_COUNT}")
        need(self.dtype in ITEMSIZE, f"unknown dtype {self.dtype!r}")
        need(self.page_size % self.tile == 0, "page_size must be a multiple of tile")
        need(self.region >= 0 and self.base >= 0 and self.first_head >= 0, "indices must not be negative")
        need(len(self.layer_ids) == self.num_layers, "layer_ids must have num_layers entries")
        need(len(set(self.layer_ids)) == self.num_layers, "layer_ids must differ")
        need(0 < self.region_bytes <= _MAX_BYTES, "region_bytes out of range")
        axes = [
            (self.layer_stride, self.num_layers),
            (self.page_stride, self.num_pages),
            (self.half_stride, self.num_halves),
            (self.token_stride * self.tile, self.page_size // self.tile),
            (self.head_stride, self.num_heads),
        ]
        extent = self.itemsize
        if self.tile > 1:
            extent *= self.tile * self.head_dim
        else:
            axes.append((self.element_stride, self.head_dim))
        # Nested axes: each must step over everything inside it. An axis of one entry never steps.
        for stride, count in sorted(axis for axis in axes if axis[1] > 1):
            need(stride >= extent, "strides let elements overlap")
            extent += stride * (count - 1)
        need(self.base + extent <= self.region_bytes, "elements lie outside the region")
        return self

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
        """A dense geometry whose axes are nested in `order`, outermost first."""
        if sorted(order) != sorted(BLOCK_MAJOR_NHD):
            raise ProtocolError(f"axis order must be a permutation of {BLOCK_MAJOR_NHD}, got {order}")
        counts: dict[Axis, int] = {
            "layer": spec.num_layers,
            "page": num_pages,
            "half": spec.num_halves,
            "token": spec.page_size,
            "head": spec.num_kv_heads,
            "element": spec.head_dim,
        }
        sizes = [counts[axis] for axis in order]
        stride = {axis: math.prod(sizes[i + 1 :]) * spec.itemsize for i, axis in enumerate(order)}
        return cls(
            group=spec.name,
            region=region,
            region_bytes=base + spec.page_bytes * num_pages,
            num_pages=num_pages,
            page_size=spec.page_size,
            num_layers=spec.num_layers,
            num_halves=spec.num_halves,
            num_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
            layer_stride=stride["layer"],
            page_stride=stride["page"],
            half_stride=stride["half"],
            token_stride=stride["token"],
            head_stride=stride["head"],
            element_stride=stride["element"],
            first_head=first_head,
            layer_ids=spec.layer_ids,
            base=base,
        ).check()

    @classmethod
    def block_major(cls, spec: GroupSpec, num_pages: int, *, region: int = 0, first_head: int = 0) -> Geometry:
        """Baton's own pool: `[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`, one region."""
        return cls.from_order(spec, num_pages, BLOCK_MAJOR_NHD, region=region, first_head=first_head)


@dataclass(frozen=True, slots=True, eq=False)
class CopyList:
    """Byte runs from one region to another: three int64 arrays `[runs]`, offsets within the regions.

    Planned lists are sorted by destination and coalesced: no two neighbours could be one run.
    """

    source_region: int
    dest_region: int
    source_offset: Int64Array
    dest_offset: Int64Array
    nbytes: Int64Array

    def __len__(self) -> int:
        return int(self.nbytes.size)

    @property
    def total(self) -> int:
        """Bytes in all runs together."""
        return int(self.nbytes.sum())

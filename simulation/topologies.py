"""A model's groups over the ranks of an engine: geometries without memory, cut as engines cut them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from baton.handoff.plan.topology import Instance, RankGeometry
from baton.kv.geometry import Geometry, Plane
from baton.kv.spec import ITEMSIZE, Cut, Owner

Axis = Literal["token", "head", "element"]


@dataclass(frozen=True, slots=True)
class Part:
    """A plane of the whole model. `unit` heads or channels stay together on one rank (a convolution's B and C are cut
    by groups of channels). If there are more ranks than units, ranks share a unit.
    """

    name: str
    cut: Cut
    num_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    unit: int = 1

    def share(self, tp: int, shard: int) -> tuple[int, int]:
        """`(first, count)` of the heads of rank `shard` of `tp`. Raises `ValueError` if they do not divide."""
        if self.cut == "whole":
            return 0, self.num_heads
        units = self.num_heads // self.unit
        if units % tp and tp % units:
            raise ValueError(f"plane {self.name!r}: {units} parts over {tp} ranks")
        width = max(units // tp, 1)
        return shard * units // tp // width * width * self.unit, width * self.unit


@dataclass(frozen=True, slots=True)
class Layers:
    """A group of the whole model. A drafter's layers are all on the last stage."""

    name: str
    parts: tuple[Part, ...]
    layer_ids: tuple[int, ...]
    owner: Owner = "target"
    page_size: int | None = None  # if it differs from the engine's: 1 of a state


Outer = Literal["page layer plane", "layer page plane", "layer plane page", "plane layer page"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How pages lie in memory: axes from the outermost in. `gap` bytes are left between things. `tile` > 1: that many
    tokens of a head are one block.
    """

    outer: Outer = "page layer plane"
    inner: tuple[Axis, Axis, Axis] = ("token", "head", "element")
    gap: int = 0
    tile: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine is cut. Stages have even shares of each group's layers. Drafters are on the first `draft_tp` ranks
    of the last stage, or on all of them.
    """

    tp: int = 1
    stages: int = 1
    draft_tp: int | None = None
    page_size: int = 16
    layout: Layout = Layout()

    @property
    def num_ranks(self) -> int:
        """Rank = stage * `tp` + shard."""
        return self.tp * self.stages

    @property
    def sampling(self) -> int:
        """The first rank of the last stage."""
        return self.num_ranks - self.tp


def instance(groups: Sequence[Layers], shape: Shape, num_pages: int = 64, rank: int = 0) -> Instance:
    """An engine that holds these groups, cut regularly, as seen from `rank`."""
    found: dict[str, list[RankGeometry]] = {}
    for group in groups:
        draft = group.owner == "draft"
        tp = shape.draft_tp or shape.tp if draft else shape.tp
        stages = 1 if draft else shape.stages
        edges = [round(i * len(group.layer_ids) / stages) for i in range(stages + 1)]
        for stage in range(stages):
            layers = group.layer_ids[edges[stage] : edges[stage + 1]]
            first_rank = shape.sampling if draft else stage * shape.tp
            for shard in range(tp) if layers else ():
                shares = [part.share(tp, shard) for part in group.parts]
                size = group.page_size or shape.page_size
                geometry = place(group.name, group.parts, shares, layers, num_pages, size, shape.layout)
                found.setdefault(group.name, []).append(RankGeometry(rank=first_rank + shard, geometry=geometry))
    return Instance(rank=rank, groups=found, sampling=shape.sampling)


def place(
    group: str,
    parts: Sequence[Part],
    shares: Sequence[tuple[int, int]],
    layers: Sequence[int],
    num_pages: int,
    page_size: int,
    layout: Layout,
    region: int = 0,
) -> Geometry:
    """The geometry of one rank that holds `shares` of `parts`."""
    sizes = [ITEMSIZE[part.dtype] for part in parts]
    blocks = [
        count * part.head_dim * size * page_size for (_, count), part, size in zip(shares, parts, sizes, strict=True)
    ]
    widest = max(sizes)
    padded = [-(-(block + layout.gap) // widest) * widest for block in blocks]
    outer = layout.outer.split()
    # Axes outside the plane axis step over all planes together, axes inside it over one plane.
    planes, at = [], layout.gap * widest
    together, starts = sum(padded), [sum(padded[:i]) for i in range(len(padded))]
    counts = {"page": num_pages, "layer": len(layers)}
    for index, part in enumerate(parts):
        depth = outer.index("plane")
        inside = math.prod(counts[axis] for axis in outer[depth + 1 :])  # of this plane alone
        base = at + starts[index] * inside
        step, strides = padded[index], {}
        for axis in reversed(outer[depth + 1 :]):
            strides[axis] = step
            step *= counts[axis]
        step = together * inside
        for axis in reversed(outer[:depth]):
            strides[axis] = step
            step *= counts[axis]
        first, count = shares[index]
        token, head, element = _inner(count, part.head_dim, sizes[index], page_size, layout)
        planes.append(
            Plane(
                name=part.name,
                dtype=part.dtype,
                cut=part.cut,
                num_heads=count,
                head_dim=part.head_dim,
                layer_stride=strides["layer"],
                page_stride=strides["page"],
                token_stride=token,
                head_stride=head,
                element_stride=element,
                first_head=first,
                base=base,
                tile=layout.tile,
            )
        )
    return Geometry(
        group=group,
        region=region,
        region_bytes=at + together * num_pages * len(layers),
        num_pages=num_pages,
        page_size=page_size,
        layer_ids=tuple(layers),
        planes=tuple(planes),
    ).check()


def _inner(num_heads: int, dim: int, size: int, page_size: int, layout: Layout) -> tuple[int, int, int]:
    """Strides of token, head and element inside a page of one plane in one layer."""
    if layout.tile > 1:
        block = layout.tile * dim * size
        tiles = page_size // layout.tile
        by_head = layout.inner.index("head") < layout.inner.index("token")
        tile_stride, head_stride = (block, block * tiles) if by_head else (block * num_heads, block)
        return tile_stride // layout.tile, head_stride, size
    counts: dict[Axis, int] = {"token": page_size, "head": num_heads, "element": dim}
    strides: dict[Axis, int] = {}
    step = size
    for axis in reversed(layout.inner):
        strides[axis] = step
        step *= counts[axis]
    return strides["token"], strides["head"], strides["element"]


def random_layout(random: Random, tile: int) -> Layout:
    """Any layout. `tile` must be the same on both sides."""
    outer: Outer = random.choice(("page layer plane", "layer page plane", "layer plane page", "plane layer page"))
    inner: list[Axis] = ["token", "head", "element"]
    random.shuffle(inner)
    first, second, third = inner
    return Layout(outer, (first, second, third), random.choice((0, 0, 3, 8)), tile)

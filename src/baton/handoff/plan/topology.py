"""Which source rank sends what: each (layer, plane, head) of a destination rank gets exactly one source rank.

Of replicas (more ranks than heads, MLA latents) exactly one sends. With attention data parallelism, each data-parallel
rank is an instance.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.kv.geometry import Geometry, Plane
from baton.kv.interval import ALL_LAYERS, Interval

GroupName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[ -~]*\Z")]
# An engine with one tensor per layer and plane has a group for each.
MAX_GROUPS = 512
MAX_RANKS = 64
_MAX_TURN = (1 << 16) - 1


class RankGeometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """The geometry of one group on one rank of an instance.

    If several source ranks hold the same data, `turn` (default: `rank`) selects which of them sends to this rank. It
    counts over all data-parallel ranks.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    geometry: Geometry
    turn: Annotated[int, Meta(ge=0, le=_MAX_TURN)] | None = None


class Instance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: `groups` has the geometries of all ranks that hold a part of each. `rank`: the sender's. `sampling`:
    the rank that samples and drafts. `apart`: each rank's agent runs in its own process and sees no messages of the
    others.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    groups: Annotated[
        dict[GroupName, Annotated[list[RankGeometry], Meta(min_length=1, max_length=MAX_RANKS)]],
        Meta(max_length=MAX_GROUPS),
    ]
    sampling: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    apart: bool = False

    @property
    def num_ranks(self) -> int:
        ranks = [found.rank for ranks in self.groups.values() for found in ranks]
        return 1 + max(self.rank, self.sampling, *ranks)

    @property
    def own(self) -> dict[str, RankGeometry]:
        return {group: found for group, ranks in self.groups.items() for found in ranks if found.rank == self.rank}

    def only(self, groups: Container[str]) -> Instance:
        kept = {group: ranks for group, ranks in self.groups.items() if group in groups}
        return msgspec.structs.replace(self, groups=kept)

    def check(self) -> Instance:
        """Returns self. Raises `ProtocolError` for an invalid geometry, or ranks that are not distinct."""
        for group, ranks in self.groups.items():
            if len({found.rank for found in ranks}) != len(ranks):
                raise ProtocolError(f"group {group!r}: a rank is named twice")
            for found in ranks:
                found.geometry.check()
        return self


@dataclass(frozen=True, slots=True)
class Box:
    """A block of (plane, layer, head) cells that one source rank sends: first local indices on both sides, and counts.

    The `num_planes` planes from index `plane` on have one shape and equal distances (`source_step`, `dest_step`,
    bytes).
    """

    plane: int
    num_planes: int
    source_step: int
    dest_step: int
    source_layer: int
    dest_layer: int
    num_layers: int
    source_head: int
    dest_head: int
    num_heads: int


def senders(sources: Sequence[RankGeometry], dest: RankGeometry) -> tuple[int, ...]:
    """The source ranks that send to `dest` in this group, ascending. `dest` must receive a COMMIT from each.

    If several hold a cell, holder r mod replicas sends it to the rank with turn r, to spread the load.

    Raises `IncompatiblePeerError`, or `ProtocolError` for a cell that no rank holds.
    """
    return tuple(assign(tuple(sources), dest))


@lru_cache(maxsize=1 << 13)
def assign(sources: tuple[RankGeometry, ...], dest: RankGeometry) -> dict[int, tuple[Box, ...]]:
    """Boxes of the destination by source rank. Cached: topologies are few."""
    to = dest.geometry.check()
    if not sources:
        raise ProtocolError(f"group {to.group!r} has no source rank")
    if len({source.rank for source in sources}) != len(sources):
        raise ProtocolError(f"group {to.group!r}: source ranks must differ")
    ordered = sorted(sources, key=lambda source: source.rank)
    for source in ordered:
        have = source.geometry.check()
        _compatible(have, to)
        if (have.page_size, have.num_pages) != (ordered[0].geometry.page_size, ordered[0].geometry.num_pages):
            raise ProtocolError(f"group {to.group!r}: source ranks must share one block table")
    out: dict[int, tuple[Box, ...]] = {}
    for first, count in _alike([source.geometry for source in ordered], to):
        for rank, boxes in _share(ordered, dest, first, count).items():
            out[rank] = (*out.get(rank, ()), *boxes)
    return dict(sorted(out.items()))


def plane_fields(geometry: Geometry) -> dict[str, object]:
    """Fields that must be equal in two geometries of one group."""
    fields: dict[str, object] = {"planes": ",".join(plane.name for plane in geometry.planes)}
    for plane in geometry.planes:
        fields |= {f"{plane.name}.{name}": getattr(plane, name) for name in ("dtype", "cut", "head_dim", "tile")}
    return fields


def _compatible(have: Geometry, want: Geometry) -> None:
    here, peer = ({"group": geometry.group, **plane_fields(geometry)} for geometry in (have, want))
    pairs = {name: (here.get(name, "absent"), peer.get(name, "absent")) for name in {**here, **peer}}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        raise IncompatiblePeerError(differing)


def _alike(sources: Sequence[Geometry], to: Geometry) -> list[tuple[int, int]]:
    """`(first, count)` of successive planes of one shape and equal distance."""
    every = [*sources, to]
    runs: list[tuple[int, int]] = []
    for index in range(len(to.planes)):
        if runs:
            first, count = runs[-1]
            if all(_continues(geometry.planes, first, index) for geometry in every):
                runs[-1] = (first, count + 1)
                continue
        runs.append((index, 1))
    return runs


def _continues(planes: Sequence[Plane], first: int, index: int) -> bool:
    shape = msgspec.structs.replace(planes[index], name=planes[first].name, base=planes[first].base)
    step, last = planes[index].base - planes[index - 1].base, planes[first + 1].base - planes[first].base
    return shape == planes[first] and step == last > 0


def _share(ordered: Sequence[RankGeometry], dest: RankGeometry, first: int, count: int) -> dict[int, tuple[Box, ...]]:
    """Boxes by source rank, for `count` planes of one shape from index `first` on."""
    to, want = dest.geometry, dest.geometry.planes[first]
    edges = {want.first_head, want.last_head}
    for source in ordered:
        have = source.geometry.planes[first]
        edges |= {min(max(head, want.first_head), want.last_head) for head in (have.first_head, have.last_head)}
    bounds = np.array(sorted(edges), dtype=np.int64)
    holds = np.zeros((len(ordered), to.num_layers, bounds.size - 1), dtype=bool)
    for holder, source in zip(holds, ordered, strict=True):
        have = source.geometry.planes[first]
        within = (have.first_head <= bounds[:-1]) & (bounds[1:] <= have.last_head)
        holder[:] = np.outer(np.isin(to.layer_ids, source.geometry.layer_ids), within)
    replicas = holds.sum(axis=0)
    if not replicas.all():
        layer, part = (int(i) for i in np.argwhere(replicas == 0)[0])
        cell = f"layer {to.layer_ids[layer]} head {int(bounds[part])}"
        raise ProtocolError(f"group {to.group!r}: nobody holds {cell} of plane {want.name!r}")
    turn = (dest.rank if dest.turn is None else dest.turn) % replicas
    chosen = np.argmax(np.cumsum(holds, axis=0) == turn + 1, axis=0)
    out: dict[int, tuple[Box, ...]] = {}
    for index in np.unique(chosen).tolist():
        source = ordered[index]
        out[source.rank] = _boxes(chosen == index, bounds, source.geometry, to, first, count)
    return out


def _boxes(
    cells: NDArray[np.bool_], bounds: NDArray[np.int64], have: Geometry, to: Geometry, first: int, count: int
) -> tuple[Box, ...]:
    """Split a mask [layers, parts between `bounds`] into rectangles that are contiguous on both sides."""
    boxes: list[Box] = []
    local = {layer: i for i, layer in enumerate(have.layer_ids)}
    source, dest = have.planes[first : first + count], to.planes[first : first + count]
    source_step, dest_step = (planes[1].base - planes[0].base if count > 1 else 0 for planes in (source, dest))
    edges = np.diff(cells.astype(np.int8), prepend=0, append=0, axis=1)
    for dest_layer in range(to.num_layers):
        heads = bounds[np.flatnonzero(edges[dest_layer])].tolist()
        for start, stop in zip(heads[::2], heads[1::2], strict=True):
            box = Box(
                plane=first,
                num_planes=count,
                source_step=source_step,
                dest_step=dest_step,
                source_layer=local[to.layer_ids[dest_layer]],
                dest_layer=dest_layer,
                num_layers=1,
                source_head=start - source[0].first_head,
                dest_head=start - dest[0].first_head,
                num_heads=stop - start,
            )
            for i, known in enumerate(boxes):
                n = known.num_layers
                at = (known.source_layer + n, known.dest_layer + n)
                if replace(known, source_layer=at[0], dest_layer=at[1], num_layers=1) == box:
                    boxes[i] = replace(known, num_layers=n + 1)
                    break
            else:
                boxes.append(box)
    return tuple(boxes)


def of_layers(boxes: Sequence[Box], to: Geometry, layers: Interval) -> Sequence[Box]:
    if layers is ALL_LAYERS:
        return boxes
    out: list[Box] = []
    for box in boxes:
        ids = to.layer_ids[box.dest_layer : box.dest_layer + box.num_layers]
        chosen = np.array([layers.start <= layer < layers.stop for layer in ids], dtype=np.int8)
        edges = np.flatnonzero(np.diff(chosen, prepend=0, append=0)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            at = (box.source_layer + start, box.dest_layer + start)
            out.append(replace(box, source_layer=at[0], dest_layer=at[1], num_layers=stop - start))
    return out

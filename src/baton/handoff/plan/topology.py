"""Who sends what to whom in one group: each (layer, head) of a destination rank gets exactly one source rank.

Sharded heads come from the ranks that hold them, pipeline stages by layer id, and of replicas (more ranks
than heads, MLA latents) exactly one sends. Every group is decided on its own, so an MLA target with an MHA
drafter has two sets of senders. Both ends compute the same answer from the same geometries; attention data
parallelism enters by passing only the chosen rank's group as sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.kv.geometry import Geometry


class RankGeometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The geometry of one group on one rank. Ranks count within one instance and differ."""

    rank: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Box:
    """A block of (layer, head) cells that one source rank sends: local first indices on both sides, and
    counts.
    """

    source_layer: int
    dest_layer: int
    num_layers: int
    source_head: int
    dest_head: int
    num_heads: int


def senders(sources: Sequence[RankGeometry], dest: RankGeometry) -> tuple[int, ...]:
    """The source ranks that send to `dest` in this group, ascending: the COMMITs the destination must count.

    Each (layer, head) that `dest` owns has exactly one sender. Where several source ranks hold it (replicated
    heads, MLA latents), destination rank r takes the (r mod replicas)-th holder, so that senders are spread
    evenly.

    Raises `IncompatiblePeerError` for layouts that cannot be copied, `ProtocolError` for a cell that nobody
    holds.
    """
    return tuple(assign(tuple(sources), dest))


@lru_cache(maxsize=256)
def assign(sources: tuple[RankGeometry, ...], dest: RankGeometry) -> dict[int, tuple[Box, ...]]:
    """Share the destination's (layer, head) cells among the sources. Cached: topologies are few."""
    to = dest.geometry.check()
    if not sources:
        raise ProtocolError(f"group {to.group!r} has no source rank")
    if len({source.rank for source in sources}) != len(sources):
        raise ProtocolError(f"group {to.group!r}: source ranks must differ")
    holds = np.zeros((len(sources), to.num_layers, to.num_heads), dtype=bool)
    ordered = sorted(sources, key=lambda source: source.rank)
    for holder, source in zip(holds, ordered, strict=True):
        have = source.geometry.check()
        _compatible(have, to)
        if (have.page_size, have.num_pages) != (ordered[0].geometry.page_size, ordered[0].geometry.num_pages):
            raise ProtocolError(f"group {to.group!r}: source ranks must share one block table")
        low, high = max(have.first_head, to.first_head), min(have.last_head, to.last_head)
        if low < high:
            holder[np.isin(to.layer_ids, have.layer_ids), low - to.first_head : high - to.first_head] = True
    replicas = holds.sum(axis=0)
    if not replicas.all():
        layer, head = (int(i) for i in np.argwhere(replicas == 0)[0])
        raise ProtocolError(f"group {to.group!r}: nobody holds layer {to.layer_ids[layer]} head {to.first_head + head}")
    turn = dest.rank % replicas
    chosen = np.argmax(np.cumsum(holds, axis=0) == turn + 1, axis=0)
    out: dict[int, tuple[Box, ...]] = {}
    for index, source in enumerate(ordered):
        boxes = _boxes(chosen == index, source.geometry, to)
        if boxes:
            out[source.rank] = boxes
    return out


def _compatible(have: Geometry, want: Geometry) -> None:
    names = ("group", "dtype", "head_dim", "num_halves", "tile")
    fields = {name: (getattr(have, name), getattr(want, name)) for name in names}
    differing = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
    if differing:
        raise IncompatiblePeerError(differing)


def _boxes(cells: NDArray[np.bool_], have: Geometry, to: Geometry) -> tuple[Box, ...]:
    """Cut a [layers, heads] mask into rectangles that are consecutive in both sides' storage."""
    boxes: list[Box] = []
    local = {layer: i for i, layer in enumerate(have.layer_ids)}
    for dest_layer in range(to.num_layers):
        edges = np.flatnonzero(np.diff(cells[dest_layer].astype(np.int8), prepend=0, append=0)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            layer = local[to.layer_ids[dest_layer]]
            head = start + to.first_head - have.first_head
            for i, box in enumerate(boxes):
                same_heads = (box.dest_head, box.num_heads) == (start, stop - start)
                n = box.num_layers
                if same_heads and (box.source_layer + n, box.dest_layer + n) == (layer, dest_layer):
                    boxes[i] = Box(box.source_layer, box.dest_layer, n + 1, head, start, stop - start)
                    break
            else:
                boxes.append(Box(layer, dest_layer, 1, head, start, stop - start))
    return tuple(boxes)

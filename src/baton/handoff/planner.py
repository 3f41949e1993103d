"""From a token interval and two block tables to the fewest byte runs, and who sends them. Pure and
vectorised.

A token interval of a group on a rank is a strided box (layer, K/V half, head, token, element). The planner
intersects source and destination boxes, lets every axis that is dense on both sides melt into the run,
expands the others by broadcasting, and merges neighbours that are contiguous on both sides. No Python loop
runs over pages or tokens.

Both ends call the same functions with the same arguments, so that the destination knows who will send without
being told. Every wanted destination byte is written exactly once, and no other byte, up to the geometry's
tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.interval import Interval
from baton.kv.geometry import NULL_PAGE, CopyList, Geometry, Int64Array

__all__ = ["CopyList", "RankGeometry", "plan", "senders"]


class RankGeometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The geometry of one group on one rank. Ranks count within one instance and differ."""

    rank: int
    geometry: Geometry


# Source offsets, destination offsets, and the one length that all these runs have.
_Runs = tuple[Int64Array, Int64Array, int]


@dataclass(frozen=True, slots=True)
class _Box:
    """A block of (layer, head) cells that one source rank sends: local first indices on both sides, and
    counts.
    """

    source_layer: int
    dest_layer: int
    num_layers: int
    source_head: int
    dest_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class _Segments:
    """Token stretches that lie in one page on both sides, by destination. Int64 arrays `[segments]`."""

    source_page: Int64Array
    source_token: Int64Array
    dest_page: Int64Array
    dest_token: Int64Array
    length: Int64Array


def senders(sources: Sequence[RankGeometry], dest: RankGeometry) -> tuple[int, ...]:
    """The source ranks that send to `dest` in this group, ascending: the COMMITs the destination must count.

    Each (layer, head) that `dest` owns has exactly one sender. Where several source ranks hold it (replicated
    heads, MLA latents), destination rank r takes the (r mod replicas)-th holder, so that senders are spread
    evenly.

    Raises `IncompatiblePeerError` for layouts that cannot be copied, `ProtocolError` for a cell that nobody
    holds.
    """
    return tuple(_assign(tuple(sources), dest))


def plan(
    sources: Sequence[RankGeometry],
    dest: RankGeometry,
    source_pages: ArrayLike,
    dest_pages: ArrayLike,
    interval: Interval,
) -> dict[int, CopyList]:
    """Plan the copies that bring `interval` of one group to `dest`; `{source rank: CopyList}`, senders only.

    `source_pages` and `dest_pages` are block tables: entry t // page_size is the page of token t, for each
    side's own page size. Entries outside the interval are ignored (they may be null). An empty interval plans
    nothing.

    Raises `ProtocolError` when a table is too short or names a page that is null, out of range or, in the
    destination, used twice; and what `senders` raises.
    """
    boxes = _assign(tuple(sources), dest)
    if interval.empty:
        return {}
    to = dest.geometry
    segments = _segments(interval.round_out(to.tile), sources[0].geometry, to, source_pages, dest_pages)
    by_rank = {source.rank: source.geometry for source in sources}
    out: dict[int, CopyList] = {}
    for rank, rank_boxes in boxes.items():
        parts = [part for box in rank_boxes for part in _expand(by_rank[rank], to, box, segments)]
        out[rank] = _coalesce(by_rank[rank].region, to.region, parts)
    return out


@lru_cache(maxsize=256)
def _assign(sources: tuple[RankGeometry, ...], dest: RankGeometry) -> dict[int, tuple[_Box, ...]]:
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
        raise ProtocolError(
            f"group {to.group!r}: nobody holds layer {to.layer_ids[layer]} head {to.first_head + head}"
        )
    turn = dest.rank % replicas
    chosen = np.argmax(np.cumsum(holds, axis=0) == turn + 1, axis=0)
    out: dict[int, tuple[_Box, ...]] = {}
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


def _boxes(cells: np.ndarray, have: Geometry, to: Geometry) -> tuple[_Box, ...]:
    """Cut a [layers, heads] mask into rectangles that are consecutive in both sides' storage."""
    boxes: list[_Box] = []
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
                    boxes[i] = _Box(box.source_layer, box.dest_layer, n + 1, head, start, stop - start)
                    break
            else:
                boxes.append(_Box(layer, dest_layer, 1, head, start, stop - start))
    return tuple(boxes)


def _pages(table: ArrayLike, index: Int64Array, geometry: Geometry, side: str) -> Int64Array:
    """Look token pages up in a block table, refusing every id that no honest peer would send."""
    pages = np.asarray(table)
    if pages.ndim != 1 or (pages.size and not np.issubdtype(pages.dtype, np.integer)):
        raise ProtocolError(f"group {geometry.group!r}: the {side} block table must be a list of page ids")
    if int(index[-1]) >= pages.size:
        raise ProtocolError(f"group {geometry.group!r}: the {side} block table ends before the interval does")
    used = pages.astype(np.int64, copy=False)[index]
    low, high = int(used.min()), int(used.max())
    if low <= NULL_PAGE:
        what = "the null page" if low == NULL_PAGE else f"page {low}"
        raise ProtocolError(f"group {geometry.group!r}: {what} in the {side} block table inside the interval")
    if high >= geometry.num_pages:
        raise ProtocolError(f"group {geometry.group!r}: {side} page {high} of {geometry.num_pages}")
    return used


def _segments(
    tokens: Interval, have: Geometry, to: Geometry, source_pages: ArrayLike, dest_pages: ArrayLike
) -> _Segments:
    starts = np.arange(tokens.start // to.page_size, -(-tokens.stop // to.page_size), dtype=np.int64)
    starts *= to.page_size
    starts[0] = tokens.start
    if have.page_size != to.page_size:
        size = have.page_size
        cuts = np.arange(tokens.start // size + 1, -(-tokens.stop // size), dtype=np.int64) * size
        starts = np.unique(np.concatenate((starts, cuts)))
    length = np.diff(starts, append=tokens.stop)
    source_index, dest_index = starts // have.page_size, starts // to.page_size
    source_page = _pages(source_pages, source_index, have, "source")
    dest_page = _pages(dest_pages, dest_index, to, "destination")
    dest_token = starts - dest_index * to.page_size
    key = dest_page * to.page_size + dest_token
    # Unique keys: the default sort, several times faster than a stable one, is deterministic.
    order = np.arange(key.size) if bool(np.all(key[1:] > key[:-1])) else np.argsort(key)
    dest_page, dest_index = dest_page[order], dest_index[order]
    if bool(np.any((dest_page[1:] == dest_page[:-1]) & (dest_index[1:] != dest_index[:-1]))):
        raise ProtocolError(f"group {to.group!r}: a destination page is named twice")
    return _Segments(
        source_page=source_page[order],
        source_token=(starts - source_index * have.page_size)[order],
        dest_page=dest_page,
        dest_token=dest_token[order],
        length=length[order],
    )


def _expand(have: Geometry, to: Geometry, box: _Box, segments: _Segments) -> list[_Runs]:
    """Runs of one box: (source offsets, destination offsets, bytes of each run), one entry per segment
    length.
    """
    source = have.base + box.source_layer * have.layer_stride + box.source_head * have.head_stride
    dest = to.base + box.dest_layer * to.layer_stride + box.dest_head * to.head_stride
    sources = segments.source_page * have.page_stride + segments.source_token * have.token_stride + source
    dests = segments.dest_page * to.page_stride + segments.dest_token * to.token_stride + dest
    tile = to.tile
    out = []
    # Segments of one length melt alike, and few lengths exist: whole pages, the ragged ends, and where pages
    # of different sizes meet.
    for length in np.flatnonzero(np.bincount(segments.length)).tolist():
        same = segments.length == length
        run = to.itemsize if tile == 1 else to.itemsize * tile * to.head_dim
        axes = [
            (to.head_dim if tile == 1 else 1, have.element_stride, to.element_stride),
            (box.num_heads, have.head_stride, to.head_stride),
            (length // tile, have.token_stride * tile, to.token_stride * tile),
            (to.num_halves, have.half_stride, to.half_stride),
            (box.num_layers, have.layer_stride, to.layer_stride),
        ]
        axes = [axis for axis in axes if axis[0] > 1]
        while dense := [axis for axis in axes if axis[1] == run and axis[2] == run]:
            axes.remove(dense[0])
            run *= dense[0][0]
        # Outermost destination stride first, so that the runs come out sorted.
        axes.sort(key=lambda axis: -axis[2])
        outer = [axis for axis in axes if axis[2] > to.page_stride]
        inner = [axis for axis in axes if axis[2] <= to.page_stride]
        out.append(
            (
                _outer([*_steps(outer, 1), sources[same], *_steps(inner, 1)]),
                _outer([*_steps(outer, 2), dests[same], *_steps(inner, 2)]),
                run,
            )
        )
    return out


def _steps(axes: list[tuple[int, int, int]], side: int) -> list[Int64Array]:
    return [np.arange(axis[0], dtype=np.int64) * axis[side] for axis in axes]


def _outer(parts: list[Int64Array]) -> Int64Array:
    total = parts[0]
    for part in parts[1:]:
        total = np.add.outer(total, part)
    return total.reshape(-1)


def _coalesce(
    source_region: int, dest_region: int, parts: list[tuple[Int64Array, Int64Array, int]]
) -> CopyList:
    source = np.concatenate([part[0] for part in parts])
    dest = np.concatenate([part[1] for part in parts])
    nbytes = np.repeat([part[2] for part in parts], [part[0].size for part in parts]).astype(np.int64)
    if not bool(np.all(dest[1:] > dest[:-1])):
        # The parts are sorted, mostly; a stable sort gets through such input in about one pass.
        order = np.argsort(dest, kind="stable")
        source, dest, nbytes = source[order], dest[order], nbytes[order]
    joined = (source[1:] == source[:-1] + nbytes[:-1]) & (dest[1:] == dest[:-1] + nbytes[:-1])
    if bool(joined.any()):
        heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        source, dest, nbytes = source[heads], dest[heads], np.add.reduceat(nbytes, heads)
    return CopyList(source_region, dest_region, source, dest, nbytes)

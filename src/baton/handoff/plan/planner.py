"""The planner: from a token interval and two block tables to the fewest byte runs, per source rank. Pure.

A token interval of a plane on a rank is a strided box (layer, head, token, element). The planner intersects source and
destination boxes, treats planes of one shape as one more axis, folds axes that are dense on both sides into the run,
broadcasts the others, and merges adjacent runs, without a Python loop over pages or tokens.

Every wanted destination byte is written exactly once, and no other byte, up to the geometry's tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from baton.errors import ProtocolError
from baton.handoff.plan.runs import TokenSegments, columns_of
from baton.handoff.plan.topology import Instance, RankGeometry, assign, of_layers, senders
from baton.kv.geometry import NULL_PAGE, CopyList, Geometry, Int64Array
from baton.kv.interval import ALL_LAYERS, Interval

__all__ = ["CopyList", "Instance", "RankGeometry", "plan_copies", "senders"]


def plan_copies(
    sources: Sequence[RankGeometry],
    dest: RankGeometry,
    source_pages: ArrayLike,
    dest_pages: ArrayLike,
    interval: Interval,
    layers: Interval = ALL_LAYERS,
    rank: int | None = None,
) -> dict[int, CopyList]:
    """Returns `{source rank: CopyList}` of one group for all ranks that send to `dest`, or only for `rank`. `layers`:
    layer ids of the model. Entries of the block tables `source_pages` and `dest_pages` outside the interval are ignored
    and may be null.

    Raises `ProtocolError` for a table that is too short, or has a null, unknown or (at the destination) repeated page
    in the interval; and the errors of `senders`.
    """
    boxes = assign(tuple(sources), dest)
    if interval.empty:
        return {}
    to = dest.geometry
    # Planes with the same tile have the same segments.
    segments = {
        tile: _segments(interval.round_out(tile), sources[0].geometry, to, source_pages, dest_pages)
        for tile in {plane.tile for plane in to.planes}
    }
    by_rank = {source.rank: source.geometry for source in sources}
    out: dict[int, CopyList] = {}
    for sender in boxes if rank is None else boxes.keys() & {rank}:
        have = by_rank[sender]
        if chosen := of_layers(boxes[sender], to, layers):
            columns = columns_of(have, to, [(box, segments[to.planes[box.plane].tile]) for box in chosen])
            out[sender] = CopyList(have.region, to.region, *columns)
    return out


def _table(pages: ArrayLike, last: int, geometry: Geometry, side: str) -> Int64Array:
    """Checks the length first: a peer's interval determines the size of an array."""
    table = np.asarray(pages)
    if table.ndim != 1 or (table.size and not np.issubdtype(table.dtype, np.integer)):
        raise ProtocolError(f"group {geometry.group!r}: the {side} block table must be a list of page ids")
    if last >= table.size:
        raise ProtocolError(f"group {geometry.group!r}: the {side} block table ends before the interval does")
    return table.astype(np.int64, copy=False)


def _pages(table: Int64Array, index: slice | Int64Array, geometry: Geometry, side: str) -> Int64Array:
    """Raises `ProtocolError` for a null or unknown page."""
    used = table[index]
    low, high = int(used.min()), int(used.max())
    if low <= NULL_PAGE:
        what = "the null page" if low == NULL_PAGE else f"page {low}"
        raise ProtocolError(f"group {geometry.group!r}: {what} in the {side} block table inside the interval")
    if high >= geometry.num_pages:
        raise ProtocolError(f"group {geometry.group!r}: {side} page {high} of {geometry.num_pages}")
    return used


@dataclass(frozen=True, slots=True)
class _Cuts:
    """An interval, cut into token ranges within one page on both sides. `source_index` and `dest_index`: entries of the
    block tables."""

    source_index: slice | Int64Array
    dest_index: slice | Int64Array
    source_token: Int64Array
    dest_token: Int64Array
    length: Int64Array


def _equal_pages(tokens: Interval, size: int) -> _Cuts:
    """The usual case, with few temporary arrays: page faults cost more than arithmetic."""
    first, last = tokens.start // size, (tokens.stop - 1) // size
    length = np.full(last + 1 - first, size, dtype=np.int64)
    token = np.zeros(last + 1 - first, dtype=np.int64)
    token[0] = tokens.start - first * size
    length[-1] -= (last + 1) * size - tokens.stop
    length[0] -= token[0]
    index = slice(first, last + 1)
    return _Cuts(index, index, token, token, length)


def _unequal_pages(tokens: Interval, source_size: int, dest_size: int) -> _Cuts:
    cuts = np.arange(tokens.start // source_size + 1, -(-tokens.stop // source_size), dtype=np.int64) * source_size
    first, last = tokens.start // dest_size, (tokens.stop - 1) // dest_size
    starts = np.arange(first, last + 1, dtype=np.int64) * dest_size
    starts[0] = tokens.start
    starts = np.unique(np.concatenate((starts, cuts)))
    length = np.diff(starts, append=tokens.stop)
    return _Cuts(starts // source_size, starts // dest_size, starts % source_size, starts % dest_size, length)


def _segments(
    tokens: Interval, have: Geometry, to: Geometry, source_pages: ArrayLike, dest_pages: ArrayLike
) -> TokenSegments:
    source_table = _table(source_pages, (tokens.stop - 1) // have.page_size, have, "source")
    dest_table = _table(dest_pages, (tokens.stop - 1) // to.page_size, to, "destination")
    equal = have.page_size == to.page_size
    cuts = _equal_pages(tokens, to.page_size) if equal else _unequal_pages(tokens, have.page_size, to.page_size)
    source_page = _pages(source_table, cuts.source_index, have, "source")
    dest_page = _pages(dest_table, cuts.dest_index, to, "destination")
    key = dest_page if equal else dest_page * to.page_size + cuts.dest_token
    if bool(np.all(key[1:] > key[:-1])):
        return TokenSegments(source_page, cuts.source_token, dest_page, cuts.dest_token, cuts.length)
    # Keys are unique: the default sort is deterministic, and several times faster than a stable one.
    order = np.argsort(key)
    columns = (source_page, cuts.source_token, dest_page, cuts.dest_token, cuts.length)
    out = TokenSegments(*(column[order] for column in columns))
    twice = out.dest_page[1:] == out.dest_page[:-1]
    if not isinstance(cuts.dest_index, slice):
        entry = cuts.dest_index[order]
        twice &= entry[1:] != entry[:-1]
    if bool(twice.any()):
        raise ProtocolError(f"group {to.group!r}: a destination page is named twice")
    return out

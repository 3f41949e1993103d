"""From one sender's boxes and the token segments of a copy to byte runs, sorted by destination and coalesced.

The runs of a box are an outer sum of the steps along its axes and of its *entries*, pieces of tokens that are
contiguous on both sides. These show whether runs are sorted and adjacent, so up to a million runs are written once and
never read. Columns are int64 `[3, N]`: source offsets, destination offsets, bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baton.handoff.plan.topology import Box
from baton.kv.geometry import Geometry, Int64Array

# Successive pages with equally many entries are written at once, up to this many stretches.
_MOST_STRETCHES = 8
# Up to this many runs, sorting and coalescing them is faster than analysing their factors.
_FEW_RUNS = 8192
# (count, source stride, destination stride) in bytes.
_Axis = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TokenSegments:
    """Token ranges within one page on both sides, in order of the destination. Int64 arrays `[segments]`."""

    source_page: Int64Array
    source_token: Int64Array
    dest_page: Int64Array
    dest_token: Int64Array
    length: Int64Array


@dataclass(frozen=True, slots=True)
class _Factors:
    """Outermost first: `outer` axes step over all pages, `middle` axes within a page over all its entries, `inner` axes
    within an entry. `entries` are columns, `pages` `[N]` their destination pages."""

    outer: Sequence[_Axis]
    entries: Int64Array
    pages: Int64Array
    middle: Sequence[_Axis]
    inner: Sequence[_Axis]


def columns_of(source_side: Geometry, dest_side: Geometry, boxes: Sequence[tuple[Box, TokenSegments]]) -> Int64Array:
    parts = [runs for box, segments in boxes for runs in _of_box(source_side, dest_side, box, segments)]
    if len(parts) == 1:
        columns, is_clean = parts[0]
        return columns if is_clean else _coalesced(columns)
    parts.sort(key=lambda runs: int(runs[0][1, 0]))
    columns = np.concatenate([runs[0] for runs in parts], axis=1)
    if not all(is_clean for _, is_clean in parts):
        return _coalesced(columns)
    pairs = [(before[:, -1], after[:, 0]) for (before, _), (after, _) in itertools.pairwise(parts)]
    apart = all(after[1] > before[1] and not _touch(after - before, before[2]).any() for before, after in pairs)
    return columns if apart else _coalesced(columns)


def _of_box(
    source_side: Geometry, dest_side: Geometry, box: Box, segments: TokenSegments
) -> Iterator[tuple[Int64Array, bool]]:
    """Columns, and whether they are sorted and coalesced."""
    for factors in _factors(source_side, dest_side, box, segments):
        axes = (*factors.outer, *factors.middle, *factors.inner)
        if factors.pages.size * math.prod(axis[0] for axis in axes) <= _FEW_RUNS:
            yield _product(factors) if axes else np.ascontiguousarray(factors.entries), False
            continue
        merged = factors if factors.middle or factors.inner else _merged(factors)
        yield _product(merged), _is_clean(merged)


def _factors(source_side: Geometry, dest_side: Geometry, box: Box, segments: TokenSegments) -> Iterator[_Factors]:
    have, to = source_side.planes[box.plane], dest_side.planes[box.plane]
    source = have.base + box.source_layer * have.layer_stride + box.source_head * have.head_stride
    dest = to.base + box.dest_layer * to.layer_stride + box.dest_head * to.head_stride
    tile = to.tile
    entries = np.empty((3, segments.length.size), dtype=np.int64)
    entries[0] = segments.source_page * have.page_stride + segments.source_token * have.token_stride + source
    entries[1] = segments.dest_page * to.page_stride + segments.dest_token * to.token_stride + dest
    units, steps = segments.length // tile, (have.token_stride * tile, to.token_stride * tile)
    piece = to.itemsize if tile == 1 else to.itemsize * tile * to.head_dim
    axes = [
        (to.head_dim if tile == 1 else 1, have.element_stride, to.element_stride),
        (box.num_heads, have.head_stride, to.head_stride),
        (box.num_planes, box.source_step, box.dest_step),
        (box.num_layers, have.layer_stride, to.layer_stride),
    ]
    if int(units.min()) == int(units.max()):
        # Tokens, or their tiles, are one more axis.
        entries[2], axes = _fold_dense(piece, [(int(units[0]), *steps), *axes])
        yield _in_order(axes, entries, segments.dest_page, to.page_stride, steps[1])
        return
    run, axes = _fold_dense(piece, axes)
    if steps != (run, run):
        which = np.repeat(np.arange(units.size), units)
        nth = np.arange(which.size) - np.repeat(np.cumsum(units) - units, units)
        entries = entries[:, which]
        entries[0] += nth * steps[0]
        entries[1] += nth * steps[1]
        entries[2] = run
        yield _in_order(axes, entries, segments.dest_page[which], to.page_stride, steps[1])
        return
    entries[2] = units * run
    left = np.ones(units.size, dtype=bool)
    for step in sorted({axis[1] for axis in axes if axis[1] == axis[2]}):
        # In whole pages more axes are dense than in partial ones.
        whole = entries[2] == step
        if bool(whole.any()):
            left &= ~whole
            more, others = _fold_dense(step, axes)
            alike = entries[:, whole]
            alike[2] = more
            yield _in_order(others, alike, segments.dest_page[whole], to.page_stride, 0)
    if bool(left.all()):
        yield _in_order(axes, entries, segments.dest_page, to.page_stride, 0)
    elif bool(left.any()):
        yield _in_order(axes, entries[:, left], segments.dest_page[left], to.page_stride, 0)


def _fold_dense(run: int, axes: Sequence[_Axis]) -> tuple[int, list[_Axis]]:
    axes = [axis for axis in axes if axis[0] > 1]
    while dense := [axis for axis in axes if axis[1] == run and axis[2] == run]:
        axes.remove(dense[0])
        run *= dense[0][0]
    return run, axes


def _in_order(axes: Sequence[_Axis], entries: Int64Array, pages: Int64Array, page_step: int, step: int) -> _Factors:
    """Sort axes by destination stride, so that runs are sorted. `step`: between entries of a page."""
    axes = sorted(axes, key=lambda axis: -axis[2])
    return _Factors(
        [axis for axis in axes if axis[2] > page_step],
        entries,
        pages,
        [axis for axis in axes if step < axis[2] <= page_step],
        [axis for axis in axes if axis[2] <= step],
    )


def _merged(factors: _Factors) -> _Factors:
    entries = factors.entries
    touch = _touch(np.diff(entries), entries[2, :-1])
    if not bool(touch.any()):
        return factors
    heads = np.concatenate(([0], np.flatnonzero(~touch) + 1))
    merged = entries[:, heads]
    merged[2] = np.add.reduceat(entries[2], heads)
    return _Factors(factors.outer, merged, factors.pages[heads], (), ())


def _touch(step: Int64Array, nbytes: Int64Array) -> Int64Array:
    """Whether a run at distance `step` (source, destination) from one of `nbytes` is adjacent on both sides."""
    touch: Int64Array = (step[0] == nbytes) & (step[1] == nbytes)
    return touch


def _is_clean(factors: _Factors) -> bool:
    entries, starts = factors.entries, _starts(factors.pages)
    ends = np.append(starts[1:], factors.pages.size) - 1
    first, last = entries[:2, :1], entries[:2, -1:]
    inside, between = _extent(factors.inner), _extent(factors.middle)
    steps = np.diff(entries[:2]) - inside
    steps[:, starts[1:] - 1] -= between
    spans = entries[:2, ends] - entries[:2, starts] + inside
    every = [
        (steps, entries[2, :-1]),
        *((step, entries[2]) for step in _steps(factors.inner, np.zeros((2, 1), dtype=np.int64))),
        *((step, entries[2, ends]) for step in _steps(factors.middle, spans)),
        *((step, entries[2, -1:]) for step in _steps(factors.outer, last + between + inside - first)),
    ]
    return all(bool((step[1] > 0).all()) and not bool(_touch(step, nbytes).any()) for step, nbytes in every)


def _starts(pages: Int64Array) -> Int64Array:
    return np.concatenate(([0], np.flatnonzero(pages[1:] != pages[:-1]) + 1))


def _extent(axes: Sequence[_Axis]) -> Int64Array:
    """From the first to the last element, `[2, 1]`: source, destination."""
    return np.array([[sum((axis[0] - 1) * axis[side] for axis in axes)] for side in (1, 2)], dtype=np.int64)


def _steps(axes: Sequence[_Axis], inside: Int64Array) -> Iterator[Int64Array]:
    """Per axis, the distance between successive runs when it steps and all axes inside it restart."""
    for at, axis in enumerate(axes):
        yield np.array([[axis[1]], [axis[2]]], dtype=np.int64) - _extent(axes[at + 1 :]) - inside


def _product(factors: _Factors) -> Int64Array:
    entries = factors.entries
    outer, middle, inner = (_offsets(tuple(axes)) for axes in (factors.outer, factors.middle, factors.inner))
    within = (middle[:, :, None] + inner[:, None, :])[:, None, :, None, :]
    num_outer, num_within = outer.shape[1], middle.shape[1] * inner.shape[1]
    size = entries.shape[1] * num_within
    out = np.empty((3, num_outer, size), dtype=np.int64)
    computed = 2 if bool((entries[2] == entries[2, 0]).all()) else 3
    out[computed:] = entries[2, 0]
    if num_within == 1:
        paged = entries[:computed]
    else:
        paged = out[:computed, 0] if num_outer == 1 else np.empty((computed, size), dtype=np.int64)
        _fill(paged, entries[:computed], _starts(factors.pages), within[:computed])
    if num_outer > 1 or num_within == 1:
        np.add(outer[:computed, :, None], paged[:, None, :], out=out[:computed])
    return out.reshape(3, -1)


def _fill(paged: Int64Array, entries: Int64Array, starts: Int64Array, within: Int64Array) -> None:
    """Fill `paged` `[columns, N]` page by page; within a page by middle axes, then entries, then inner axes. Pages
    begin at `starts` in `entries`; `within`: the steps of the axes, `[columns, 1, middle, 1, inner]`.
    """
    rows, num_middle, num_inner = len(within), within.shape[2], within.shape[4]
    if num_middle == 1 or starts.size == entries.shape[1]:
        each = within.reshape(rows, 1, -1)
        np.add(entries[:, :, None], each, out=paged.reshape(rows, -1, each.shape[2]))
        return
    counts = np.diff(starts, append=entries.shape[1])
    cuts = np.concatenate(([0], np.flatnonzero(counts[1:] != counts[:-1]) + 1, [counts.size])).tolist()
    if len(cuts) <= _MOST_STRETCHES + 1:
        for begin, end in itertools.pairwise(cuts):
            num_pages, count, at = end - begin, int(counts[begin]), int(starts[begin])
            stop = at + num_pages * count
            place = paged[:, at * num_middle * num_inner : stop * num_middle * num_inner]
            own = entries[:, at:stop].reshape(rows, num_pages, 1, count, 1)
            np.add(own, within, out=place.reshape(rows, num_pages, num_middle, count, num_inner))
    else:
        alike, first = np.repeat(counts, counts), np.repeat(starts, counts)
        nth = np.arange(alike.size) - first
        places = (num_middle * first + nth)[:, None] + alike[:, None] * np.arange(num_middle)
        for row in range(rows):
            paged[row].reshape(-1, num_inner)[places] = entries[row, :, None, None] + within[row, 0, :, 0]


@functools.lru_cache(maxsize=64)
def _offsets(axes: tuple[_Axis, ...]) -> Int64Array:
    total = np.zeros((3, 1), dtype=np.int64)
    for count, source_step, dest_step in axes:
        steps = np.arange(count) * np.array([[source_step], [dest_step], [0]])
        total = (total[:, :, None] + steps[:, None, :]).reshape(3, -1)
    total.setflags(write=False)
    return total


def _coalesced(columns: Int64Array) -> Int64Array:
    if not bool(np.all(columns[1, 1:] > columns[1, :-1])):
        # A stable sort of mostly sorted input takes about one pass.
        columns = np.take(columns, np.argsort(columns[1], kind="stable"), axis=1)  # rows stay contiguous
    source, dest, nbytes = columns
    joined = (source[1:] == source[:-1] + nbytes[:-1]) & (dest[1:] == dest[:-1] + nbytes[:-1])
    if not bool(joined.any()):
        return columns
    heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return np.stack((source[heads], dest[heads], np.add.reduceat(nbytes, heads)))

"""The free list of a page pool, as maximal runs of adjacent pages: the planner copies a run at once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class Extents:
    """Runs [start, stop) of free pages, merged when pages are freed. Allocation is best fit, which keeps long runs for
    long prompts. Taking and returning a run cost O(log n) in the number of distinct lengths."""

    def __init__(self, start: int, stop: int) -> None:
        self.num_pages = 0
        self._stops: dict[int, int] = {}  # by start
        self._starts: dict[int, int] = {}  # by stop
        self._by_length: dict[int, dict[int, None]] = {}  # starts, longest free first
        self._lengths: list[int] = []  # sorted
        self._insert(start, stop)

    def add(self, pages: Iterable[int]) -> None:
        start = stop = -1
        for page in sorted(pages):
            if page != stop:
                if stop >= 0:
                    self._merge(start, stop)
                start = page
            stop = page + 1
        if stop >= 0:
            self._merge(start, stop)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages, or all that are free: first the run right after the used page `after`, then as few runs
        as possible.
        """
        picked: list[int] = []
        if after is not None and after + 1 in self._stops:
            picked += self._cut(after + 1, count)
        while len(picked) < count:
            missing = count - len(picked)
            # The shortest run that is long enough, or the longest.
            index = min(bisect_left(self._lengths, missing), len(self._lengths) - 1)
            picked += self._cut(next(iter(self._by_length[self._lengths[index]])), missing)
        return picked

    def _cut(self, start: int, count: int) -> range:
        stop = self._remove(start)
        end = min(start + count, stop)
        if end < stop:
            self._insert(end, stop)
        return range(start, end)

    def _merge(self, start: int, stop: int) -> None:
        if stop in self._stops:
            stop = self._remove(stop)
        if (before := self._starts.get(start)) is not None:
            self._remove(before)
            start = before
        self._insert(start, stop)

    def _insert(self, start: int, stop: int) -> None:
        self._stops[start], self._starts[stop] = stop, start
        length = stop - start
        self.num_pages += length
        if length not in self._by_length:
            self._by_length[length] = {}
            insort(self._lengths, length)
        self._by_length[length][start] = None

    def _remove(self, start: int) -> int:
        stop = self._stops.pop(start)
        del self._starts[stop]
        length = stop - start
        self.num_pages -= length
        del self._by_length[length][start]
        if not self._by_length[length]:
            del self._by_length[length], self._lengths[bisect_left(self._lengths, length)]
        return stop

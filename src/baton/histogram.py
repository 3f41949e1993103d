"""A Prometheus histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds, from the time to plan a copy to the longest wait for a handoff.
SECONDS = (2e-5, 1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
RUNS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16_384, 65_536)


class Histogram:
    """Written by one thread. Others may read at any time, but counts may be inconsistent."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @classmethod
    def sum_of(cls, many: Sequence[Histogram]) -> Histogram:
        """They must have the same bounds."""
        total = cls(many[0]._bounds)
        total._counts = [sum(counts) for counts in zip(*(one._counts for one in many), strict=True)]
        total.total = sum(one.total for one in many)
        return total

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, number of observations at or below it); the last bound is "+Inf"."""
        found, sum_ = [], 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            sum_ += count
            found.append((str(bound), float(sum_)))
        return found

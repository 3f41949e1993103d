"""The expected acceptance of a decode engine's own drafts, from the prefill engine's drafts of the same request."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from baton.observe.acceptance import RequestAcceptance

_KEPT = 4096
_MIN_REQUESTS = 32
# The standard deviation of the ratio over n requests is about this, divided by the root of n.
_NOISE = 1.1


class DraftPair(NamedTuple):
    """One handed-off request's shares of accepted drafts, in [0, 1]: in its first verification, of the prefill engine's
    drafts, and the mean of the later ones, of the decode engine's. Later verifications with fewer positions than the
    first are left out.
    """

    first: float
    later: float

    @classmethod
    def of(cls, request: RequestAcceptance) -> DraftPair | None:
        """None without a handoff, or if one of the two has no drafts."""
        first, *later = [(a, d) for a, d in zip(request.accepted, request.drafted, strict=False) if d] or [(0, 0)]
        if not later or not request.drafted[0] or not request.group.handed_off:
            return None
        common = min(first[1], max(drafted for _, drafted in later))
        counts = [min(accepted, common) for accepted, drafted in later if drafted >= common]
        return cls(min(first[0], common) / common, sum(counts) / (common * len(counts)))


@dataclass(slots=True)
class _Sums:
    count: int = 0
    first: float = 0.0
    later: float = 0.0

    def add(self, pair: DraftPair, sign: int) -> None:
        self.count += sign
        self.first += sign * pair.first
        self.later += sign * pair.later


class ExpectedDrafts:
    """Over the last handed-off requests: the decode engine's acceptance as a share of the prefill engine's. It is
    similar for easy and hard prompts, so engines with different prompts can be compared."""

    def __init__(self) -> None:
        self._last: deque[tuple[str, DraftPair]] = deque()
        self._sums: dict[str, _Sums] = {}
        self._total = _Sums()

    def add(self, decode: str, pair: DraftPair) -> None:
        self._last.append((decode, pair))
        self._count(decode, pair, 1)
        if len(self._last) > _KEPT:
            self._count(*self._last.popleft(), -1)

    def ratio(self, without: str) -> tuple[float, float] | None:
        """Later over first acceptance on all other engines, at most 1 (a bad prefill drafter would raise it), and its
        lower bound by chance. None with too few requests."""
        own = self._sums.get(without, _Sums())
        count, first = self._total.count - own.count, self._total.first - own.first
        if count < _MIN_REQUESTS or first <= 0.0:
            return None
        ratio = min((self._total.later - own.later) / first, 1.0)
        return ratio, ratio * max(0.0, 1.0 - _NOISE / math.sqrt(count))

    def _count(self, decode: str, pair: DraftPair, sign: int) -> None:
        self._total.add(pair, sign)
        sums = self._sums.setdefault(decode, _Sums())
        sums.add(pair, sign)
        if not sums.count:
            del self._sums[decode]

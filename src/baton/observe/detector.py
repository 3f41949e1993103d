"""A sequential test of whether one mean has fallen below another, with a bound on false alarms."""

from __future__ import annotations

from collections import deque

# At most one false alarm in this many comparisons.
THRESHOLD = 1e7
# An alarm ends when the mean of this many pairs is as it should be.
_RECENT = 100
_BETS = (0.25, 0.5, 0.75, 0.95)  # as shares of the largest bet


class DropDetector:
    """Tests pairs of observations in [0, 1]: is the mean of the first still at least that of the second, less `margin`?

    The null hypothesis is that each difference d = observed - reference + `margin` has a mean of at least 0, given the
    earlier ones. Then each factor 1 - bet * d has a mean of at most 1, and R = (R + 1) * factor, averaged over several
    bets, has a mean of at most n after n pairs. So the probability that R reaches `THRESHOLD` within n pairs is at most
    n / `THRESHOLD`, whenever one looks. This is a Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo, 2024): it
    finds a fall that begins at any time.
    """

    __slots__ = ("_bets", "_margin", "_recent", "_statistics", "alarmed", "num_pairs")

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._bets = tuple(share / (1.0 + margin) for share in _BETS)
        self._statistics = [0.0] * len(_BETS)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.alarmed = False
        self.num_pairs = 0

    @property
    def statistic(self) -> float:
        return sum(self._statistics) / len(self._statistics)

    def observe(self, observed: float, reference: float) -> None:
        self.num_pairs += 1
        difference = observed - reference + self._margin
        self._recent.append(difference)
        if self.alarmed:
            if len(self._recent) == _RECENT and sum(self._recent) >= 0.0:
                self.alarmed, self._statistics = False, [0.0] * len(_BETS)
            return
        self._statistics = [
            (statistic + 1.0) * (1.0 - bet * difference)
            for statistic, bet in zip(self._statistics, self._bets, strict=True)
        ]
        self.alarmed = self.statistic >= THRESHOLD
        if self.alarmed:
            self._recent.clear()

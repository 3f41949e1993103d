"""A sequential test of whether a mean has fallen below a limit, with a bound on false alarms."""

from __future__ import annotations

from collections import deque

# While the mean is at its limit: at most one false alarm in this many observations.
THRESHOLD = 1e6
# An alarm ends when the mean of this many observations is as it should be.
_RECENT = 100
_BETS = (0.25, 0.5, 0.75, 0.95)  # as shares of the largest bet


class DropDetector:
    """Tests whether the mean of each observation in [0, 1], given the earlier ones, is at least its limit.

    A limit is less than 1 and known before its observation. If the null hypothesis holds, each factor 1 - bet *
    (observed - limit) has a mean of at most 1, and R = (R + 1) * factor, averaged over several bets, one of at most n
    after n observations. So R reaches `THRESHOLD` with probability at most n / `THRESHOLD`, at any stopping time: a
    Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo, 2024).
    """

    __slots__ = ("_recent", "_statistics", "alarmed", "num_observed")

    def __init__(self) -> None:
        self._statistics = [0.0] * len(_BETS)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.alarmed = False
        self.num_observed = 0

    @property
    def statistic(self) -> float:
        return sum(self._statistics) / len(self._statistics)

    def observe(self, observed: float, limit: float) -> None:
        self.num_observed += 1
        above = observed - limit
        if self.alarmed:
            self._recent.append(above)
            if len(self._recent) == _RECENT and sum(self._recent) >= 0.0:
                self.alarmed, self._statistics = False, [0.0] * len(_BETS)
                self._recent.clear()
            return
        stake = above / (1.0 - limit)
        self._statistics = [
            (statistic + 1.0) * (1.0 - bet * stake) for statistic, bet in zip(self._statistics, _BETS, strict=True)
        ]
        self.alarmed = self.statistic >= THRESHOLD

"""Whether drafts pay, by trial: tokens per second of steps with the chosen drafts against steps without any, since the
cost model's errors may be larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

# The weight that past steps keep when a new period of their kind begins.
_KEEP = 0.9
# The model's choice stays unless steps without drafts are faster by more than this over the square root of the
# verifications.
_DOUBT = 0.75
# Steps until the worse kind is tried again, doubled each time, and of a try: new requests make periods short.
TRY_AFTER, TRY_SELDOM, TRY_STEPS = 128, 1024, 8
# The share of all time that tries may lose.
_LOST = 0.01
# Batches whose sizes differ by less than this factor are compared with each other.
_LIKE = 1.3
# A step of more than this many times the mean counts as that long.
_DISTURBED = 3.0


@dataclass(slots=True)
class StepRate:
    rows: float = 0.0  # steps, times their requests
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def fade(self) -> None:
        self.rows, self.tokens, self.seconds = self.rows * _KEEP, self.tokens * _KEEP, self.seconds * _KEEP


class _Comparison:
    def __init__(self) -> None:
        self.rates = {True: StepRate(), False: StepRate()}
        self._better: bool | None = None
        self._wait = self.left = TRY_AFTER  # steps, and those before the next try
        self._tries = False

    def next(self) -> bool:
        """Whether a new period drafts."""
        with_drafts, without = self.rates[True].per_second, self.rates[False].per_second
        if not with_drafts or not without:
            return not with_drafts
        better = with_drafts * (1.0 + _DOUBT / math.sqrt(self.rates[True].rows)) > without
        lost = TRY_STEPS * (max(with_drafts, without) / min(with_drafts, without) - 1.0)
        if better != self._better:
            self._better, self._wait, self.left = better, TRY_AFTER, max(TRY_AFTER, int(lost / _LOST))
            self._tries = False
        elif self._tries and self.left <= -TRY_STEPS:
            self._wait, self._tries = min(2 * self._wait, TRY_SELDOM), False
            self.left = max(self._wait, int(lost / _LOST))
        elif self.left <= 0 and not self._tries:
            self._tries, self.left = True, 0
        return better is not self._tries

    @property
    def is_trying(self) -> bool:
        return self._tries or not all(rate.seconds for rate in self.rates.values())


class Trials:
    """One comparison for each size of the batch. A period is a time in which all steps draft, or none."""

    def __init__(self) -> None:
        self._comparisons: defaultdict[int, _Comparison] = defaultdict(_Comparison)
        self._size = 0
        self._drafts: bool | None = None  # of this period
        self._first = True

    def begin(self, num_requests: int) -> bool:
        """Whether a new period drafts."""
        self._size = _size(num_requests)
        comparison = self._comparisons[self._size]
        drafts = comparison.next()
        if drafts != self._drafts:
            self._first = True
        self._drafts = drafts
        comparison.rates[drafts].fade()
        return drafts

    @property
    def is_trying(self) -> bool:
        return self._comparisons[self._size].is_trying

    def end(self) -> None:
        """Steps from now on are not compared."""
        self._drafts = None

    def computed(self, num_requests: int, num_accepted: int, seconds: float) -> None:
        """A step. The first one after a change still verifies, or lacks, the last period's drafts."""
        if self._drafts is None:
            return
        comparison, same_size = self._comparisons[self._size], _size(num_requests) == self._size
        comparison.left -= same_size
        if not self._first and same_size:
            rate = comparison.rates[self._drafts]
            if rate.seconds:
                seconds = min(seconds, _DISTURBED * num_requests * rate.seconds / rate.rows)
            rate.rows += num_requests
            rate.tokens += num_requests + num_accepted
            rate.seconds += seconds
        self._first = False


def _size(num_requests: int) -> int:
    return int(math.log(num_requests, _LIKE))

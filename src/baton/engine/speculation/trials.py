"""Whether drafts pay, by trial: tokens per second of steps with the chosen drafts against steps without any.

Where drafts save little, the cost model's errors are larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

# Of a past period's weight, per period of the same kind.
_KEEP = 0.9
# The model's choice stays unless steps without drafts are faster by more than this over the square root of the
# verifications: about 1.5 standard deviations of the tokens that a verification makes.
_DOUBT = 0.75
# Periods until the worse kind is tried again, twice as many each time.
TRY_AFTER, TRY_SELDOM = 8, 64
# Batches whose numbers of requests differ by less than this factor are compared.
_LIKE = 1.3
# Times the mean.
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
        self._wait = self._left = TRY_AFTER  # periods, and those before the next try

    def next(self) -> bool:
        """Whether a new period drafts."""
        with_drafts, without = self.rates[True].per_second, self.rates[False].per_second
        if not with_drafts or not without:
            return not with_drafts
        better = with_drafts * (1.0 + _DOUBT / math.sqrt(self.rates[True].rows)) > without
        if better != self._better:
            self._better, self._wait, self._left = better, TRY_AFTER, TRY_AFTER
        self._left -= 1
        if self._left:
            return better
        self._wait = self._left = min(2 * self._wait, TRY_SELDOM)
        return not better


class Trials:
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

    def end(self) -> None:
        """Steps from now on are not compared."""
        self._drafts = None

    def computed(self, num_requests: int, num_accepted: int, seconds: float) -> None:
        """A step. The first one after a change still verifies, or lacks, the last period's drafts."""
        if self._drafts is None:
            return
        if not self._first and _size(num_requests) == self._size:
            rate = self._comparisons[self._size].rates[self._drafts]
            if rate.seconds:
                seconds = min(seconds, _DISTURBED * num_requests * rate.seconds / rate.rows)
            rate.rows += num_requests
            rate.tokens += num_requests + num_accepted
            rate.seconds += seconds
        self._first = False


def _size(num_requests: int) -> int:
    return int(math.log(num_requests, _LIKE))

"""Whether drafts pay, by trial: tokens per second of steps with the chosen drafts against steps without any.

Where drafts save little, the cost model's errors are larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of a past period's weight, per period of the same kind.
_KEEP = 0.9
# The model's choice stays unless steps without drafts are faster by more than this over the square root of the
# verifications: about 1.5 standard deviations of the tokens that a verification makes.
_DOUBT = 0.75
# Periods until the worse kind is tried again, twice as many each time.
TRY_AFTER, TRY_SELDOM = 8, 128
# A batch counts as another if it has this many times as many requests, or as few.
_OTHER_BATCH = 1.3


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


class Trials:
    def __init__(self) -> None:
        self._num_requests = 0
        self._rates = {True: StepRate(), False: StepRate()}
        self._better: bool | None = None
        self._wait = self._left = TRY_AFTER  # periods, and those before the next try
        self._drafts: bool | None = None  # of this period
        self._first = True

    def begin(self, num_requests: int) -> bool:
        """A new period: whether it drafts."""
        if not self._num_requests / _OTHER_BATCH < num_requests < self._num_requests * _OTHER_BATCH:
            self._num_requests, self._better = num_requests, None
            self._rates = {True: StepRate(), False: StepRate()}
        drafts = self._next()
        if drafts != self._drafts:
            self._first = True
        self._drafts = drafts
        self._rates[drafts].fade()
        return drafts

    def _next(self) -> bool:
        with_drafts, without = self._rates[True].per_second, self._rates[False].per_second
        if not with_drafts or not without:
            return not with_drafts
        better = with_drafts * (1.0 + _DOUBT / math.sqrt(self._rates[True].rows)) > without
        if better != self._better:
            self._better, self._wait, self._left = better, TRY_AFTER, TRY_AFTER
        self._left -= 1
        if self._left:
            return better
        self._wait = self._left = min(2 * self._wait, TRY_SELDOM)
        return not better

    def end(self) -> None:
        """Steps from now on are not compared."""
        self._drafts = None

    def computed(self, num_requests: int, num_accepted: int, seconds: float) -> None:
        """A step. The first one after a change still verifies, or lacks, the last period's drafts."""
        if self._drafts is None:
            return
        if not self._first:
            rate = self._rates[self._drafts]
            rate.rows += num_requests
            rate.tokens += num_requests + num_accepted
            rate.seconds += seconds
        self._first = False

"""Whether drafts pay, by trial: tokens per second with the chosen drafts against none, since the cost model errs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

# The weight that comparisons keep at the next one, and steps at the next period.
_KEEP, _KEEP_STEPS = 0.9, 0.5
# Steps without drafts must be faster by more than this over the root of the verifications.
_DOUBT = 0.75
# Steps until the worse kind is tried again, doubled each time, and of a try.
TRY_AFTER, TRY_SELDOM, TRY_STEPS = 128, 1024, 8
# Comparisons before one kind is chosen.
FIRST = 4
# The share of all time that tries may lose.
_LOST = 0.01
# Batches that differ by less than this factor are compared.
_LIKE = 1.3
# A step counts as at most this many times the mean.
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
        self.rows, self.tokens, self.seconds = (_KEEP_STEPS * part for part in (self.rows, self.tokens, self.seconds))


class _Comparison:
    """Of steps before and after a change: a machine may be slow for minutes."""

    def __init__(self) -> None:
        self._drafts: bool | None = None
        self.now, self._before = StepRate(), StepRate()
        self._is_open = False
        self._log = self._weight = 0.0  # of ended comparisons
        self._num_ended = 0
        self._better: bool | None = None
        self._wait = self.left = TRY_AFTER  # steps, and those before the next try
        self._tries = False

    def begin(self) -> bool:
        """Whether a new period drafts."""
        drafts = self._next()
        if drafts is not self._drafts:
            self._close()
            self._before, self.now, self._drafts, self._is_open = self.now, StepRate(), drafts, True
            if self._better is None:
                self.left = 0
        self.now.fade()
        return drafts

    def _next(self) -> bool:
        if self._is_open and self.now.rows >= self._before.rows > 0.0:
            self._close()
        if self._num_ended < FIRST:
            return self._drafts is not True if self.left <= -TRY_STEPS else self._drafts is not False
        log, weight = self._gain()
        better = math.exp(log) * (1.0 + _DOUBT / math.sqrt(weight)) > 1.0
        lost = TRY_STEPS * math.expm1(abs(log))
        if better != self._better:
            self._better, self._wait, self.left = better, TRY_AFTER, max(TRY_AFTER, int(lost / _LOST))
            self._tries = False
        elif self._tries and self.left <= -TRY_STEPS:
            self._wait, self._tries = min(2 * self._wait, TRY_SELDOM), False
            self.left = max(self._wait, int(lost / _LOST))
        elif self.left <= 0 and not self._tries:
            self._tries, self.left = True, 0
        elif (self.now.per_second > self._before.per_second) is not (better is self._drafts):
            self.left = min(self.left, TRY_AFTER)
        return better is not self._tries

    def _gain(self) -> tuple[float, float]:
        """The logarithm of the gain by drafts, and its verifications."""
        log, total = self._log, self._weight
        if self._is_open and self.now.seconds and self._before.seconds:
            weight = min(self.now.rows, self._before.rows)
            gain = math.log(self.now.per_second / self._before.per_second)
            log, total = log + weight * (gain if self._drafts else -gain), total + weight
        return log / total if total else 0.0, total

    def _close(self) -> None:
        if self._is_open:
            log, weight = self._gain()
            self._num_ended += weight > self._weight
            self._log, self._weight, self._is_open = _KEEP * log * weight, _KEEP * weight, False

    @property
    def is_trying(self) -> bool:
        return self._tries or self._better is None


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
        drafts = self._comparisons[self._size].begin()
        if drafts != self._drafts:
            self._first = True
        self._drafts = drafts
        return drafts

    @property
    def is_trying(self) -> bool:
        return self._comparisons[self._size].is_trying

    def end(self) -> None:
        """Steps from now on are not compared."""
        self._drafts = None

    def computed(self, num_requests: int, num_accepted: int, seconds: float) -> None:
        """The first step after a change still verifies, or lacks, the last period's drafts."""
        if self._drafts is None:
            return
        comparison, same_size = self._comparisons[self._size], _size(num_requests) == self._size
        comparison.left -= same_size
        if not self._first and same_size:
            rate = comparison.now
            if rate.seconds:
                seconds = min(seconds, _DISTURBED * num_requests * rate.seconds / rate.rows)
            rate.rows += num_requests
            rate.tokens += num_requests + num_accepted
            rate.seconds += seconds
        self._first = False


def _size(num_requests: int) -> int:
    return int(math.log(num_requests, _LIKE))

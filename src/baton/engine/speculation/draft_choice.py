"""The choice of drafts for R requests, as a pure function: the most expected tokens per second.

All drafts are made; those likely enough to be accepted are verified: the others' rows would cost more than they bring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


# A smaller predicted gain may be an error of the estimates.
LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Seconds. `base`: of a round, besides verification. `start`: for drafting at all. `depth`: of a drafter pass.
    `draft`: of making one draft. `verified` [1 + R x K]: of verification, by number of drafts."""

    base: float
    start: float
    depth: float
    draft: float
    verified: FloatArray

    def verification(self, num_drafts: FloatArray) -> FloatArray:
        """Seconds of one verification, by the mean number of drafts."""
        return np.interp(num_drafts, np.arange(len(self.verified)), self.verified)


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """`counts` int64 [R]: drafts to make. Of them those are verified whose survival is at least `threshold`."""

    counts: IntArray
    threshold: float = 0.0


def choose_drafts(survival_RSK: FloatArray, most: IntArray, costs: RoundCosts) -> DraftChoice:
    """`survival_RSK`: the probability that a draft and all before it are accepted, in S equally likely cases."""
    num_requests, cases, deepest = survival_RSK.shape
    none = num_requests / ((costs.base + float(costs.verified[0])) or 1.0)
    best, choice = LEAST_GAIN * none, DraftChoice(np.zeros(num_requests, dtype=np.int64))
    for depth in range(1, min(deepest, int(most.max(initial=0))) + 1):
        bounds = np.minimum(most, depth)
        survival = np.where(np.arange(depth) < bounds[:, None, None], survival_RSK[:, :, :depth], 0.0)
        # The first n are the best n, and a request's own are in order, since survival never rises.
        ordered = np.sort(survival, axis=None)[::-1]
        num_verified = np.arange(1, 1 + len(ordered)) / cases
        seconds = costs.base + costs.start + costs.depth * depth + costs.draft * int(bounds.sum())
        verification = costs.verification(num_verified)
        rates = (num_requests + ordered.cumsum() / cases) / (seconds + verification)
        last = int(np.argmax(rates))
        if rates[last] > best:
            best, threshold = float(rates[last]), float(ordered[last])
            verified = float(verification[last] - costs.verified[0]) / float(num_verified[last])
            choice = DraftChoice(_worth_making(survival, threshold, best * verified, best * costs.draft), threshold)
    return choice


def _worth_making(survival_RSK: FloatArray, threshold: float, verified: float, made: float) -> IntArray:
    """Drafts per request, none for those that would cost more than they bring. `verified`, `made`: what doing that with
    a draft costs, in tokens."""
    kept = (survival_RSK >= threshold) & (survival_RSK > 0.0)
    counts = kept.any(axis=1).sum(axis=1)
    gained = np.where(kept, survival_RSK - verified, 0.0).sum(axis=2).mean(axis=1)
    return np.where(gained > made * counts, counts, 0)

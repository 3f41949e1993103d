"""The choice of k for R requests, as a pure function: the most expected tokens per second."""

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
    """Seconds. `base`: of a round without drafts. `start`: for drafting at all. `draft` [R]: of one draft and its
    verification. `depth`: of a drafter pass. `more` [1 + drafts]: by number of drafts, besides `draft`."""

    base: float
    start: float
    draft: FloatArray
    depth: float
    more: FloatArray


def choose_drafts(survival_RK: FloatArray, most: IntArray, costs: RoundCosts) -> IntArray:
    """The best number of drafts per request, int64 [R], at most `most`.

    `survival_RK`: the probability that a draft and all before it are accepted.
    """
    num_requests, deepest = survival_RK.shape
    allowed = np.arange(deepest) < most[:, None]
    if not allowed.any():
        return np.zeros(num_requests, dtype=np.int64)
    # The first n are the best n, and a request's own are in order, since survival never rises.
    order = np.argsort(-(survival_RK / costs.draft[:, None]).ravel(), kind="stable")
    request, position = np.divmod(order, deepest)
    allowed = allowed.ravel()[order]
    # Row d: only the first d + 1 drafts of each request.
    taken = allowed & (position <= np.arange(deepest)[:, None])
    tokens = num_requests + np.cumsum(taken * survival_RK.ravel()[order], axis=1)
    seconds = costs.base + costs.start + costs.depth * np.arange(1, deepest + 1)[:, None]
    seconds = seconds + np.cumsum(taken * costs.draft[request], axis=1) + costs.more[np.cumsum(taken, axis=1)]
    rates = tokens / seconds
    best = int(np.argmax(rates))
    if rates.flat[best] <= LEAST_GAIN * num_requests / costs.base:
        return np.zeros(num_requests, dtype=np.int64)
    depth, last = divmod(best, len(order))
    return np.bincount(request[: last + 1], taken[depth, : last + 1], num_requests).astype(np.int64)

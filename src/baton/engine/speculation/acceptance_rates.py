"""Estimates of acceptance: rates per draft position, given that earlier drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# High, so that a new drafter is tried.
FIRST_GUESS = 0.7
# How many drafts the guess, and a request's prior, count as.
_GUESS_WEIGHT, _OWN_WEIGHT = 8.0, 5.0
# A position with few samples is assumed a little worse than the one before it.
_LATER = 0.85
# Factors of a count's weight, per verification.
_KEEP_ALL, _KEEP_OWN = 0.998, 0.95
# A streak must not keep a request at the most drafts.
_HIGHEST = 0.98
_HEAVIEST = 1e100


class Counts:
    """Drafts per position. Old ones fade."""

    def __init__(self, most: int) -> None:
        self._hits, self._tries, self._weight = [0.0] * most, [0.0] * most, 1.0

    @property
    def hits(self) -> FloatArray:
        return np.array(self._hits) / self._weight

    @property
    def tries(self) -> FloatArray:
        return np.array(self._tries) / self._weight

    def add(self, num_drafts: int, num_accepted: int, keep: float) -> None:
        """Drafts after the first wrong one were not tried."""
        weight, most = self._weight / keep, len(self._hits)
        self._weight = weight
        for position in range(min(num_accepted, most)):
            self._hits[position] += weight
        for position in range(min(num_drafts, num_accepted + 1, most)):
            self._tries[position] += weight
        if weight > _HEAVIEST:
            self._hits, self._tries, self._weight = self.hits.tolist(), self.tries.tolist(), 1.0


class AcceptanceRates:
    def __init__(self, most: int) -> None:
        self._max_drafts, self._all = most, Counts(most)

    def new(self) -> Counts:
        return Counts(self._max_drafts)

    def verified(self, own: Counts, num_drafts: int, num_accepted: int) -> None:
        own.add(num_drafts, num_accepted, _KEEP_OWN)
        self._all.add(num_drafts, num_accepted, _KEEP_ALL)

    def _rates(self) -> FloatArray:
        guess, rates = FIRST_GUESS, []
        for hits, tries in zip(self._all.hits.tolist(), self._all.tries.tolist(), strict=True):
            rates.append((hits + _GUESS_WEIGHT * guess) / (tries + _GUESS_WEIGHT))
            guess = rates[-1] * _LATER
        return np.array(rates)

    def survival(self, requests: Sequence[Counts | None]) -> FloatArray:
        """The probability [R, most] that a draft and all before it are accepted."""
        none = np.zeros(self._max_drafts)
        hits = np.stack([none if own is None else own.hits for own in requests])
        tries = np.stack([none if own is None else own.tries for own in requests])
        rates = (hits + _OWN_WEIGHT * self._rates()) / (tries + _OWN_WEIGHT)
        survival: FloatArray = np.minimum(rates, _HIGHEST).cumprod(axis=1)
        return survival

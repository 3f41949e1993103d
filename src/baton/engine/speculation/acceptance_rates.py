"""Estimates of acceptance: rates by draft position and margin (`DraftBatch.margins`), given that earlier drafts were
accepted. Like EAGLE-2's confidence (arXiv:2406.16858), margins are known before verification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Upper bounds of the classes of margins. Margins that a drafter does not report have the last class.
_BOUNDS = np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, np.finfo(np.float64).max])
UNKNOWN = len(_BOUNDS)
# High for unknown margins, so that a new drafter is tried.
FIRST_GUESS = 0.7
_FIRST_GUESSES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.93, FIRST_GUESS)
# How many drafts a guess counts as, and a request's factor of 1.
_GUESS_WEIGHT, _OWN_WEIGHT = 8.0, 5.0
# A position with few samples is assumed a little worse than the one before it.
_LATER = 0.85
# Factors of a count's weight, per verification.
_KEEP_ALL, _KEEP_OWN = 0.999, 0.95
# The most by which a request's log-odds may differ from those of all requests.
_MOST_SHIFT = 3.0
# A streak must not keep a request at the most drafts.
_HIGHEST = 0.98
_HEAVIEST = 1e100
# Requests whose latest drafts' classes are kept.
_NUM_SAMPLES, _SAMPLES_OF_STEP = 256, 8


def classes_of(margins: npt.ArrayLike) -> IntArray:
    """NaN is unknown, too."""
    return np.searchsorted(_BOUNDS, margins)


class OwnFactor:
    """A request's odds of acceptance over those of all: a step of Newton's method on the log-odds. Old drafts fade."""

    def __init__(self) -> None:
        self._surplus, self._variance = 0.0, 0.25 * _OWN_WEIGHT

    @property
    def factor(self) -> float:
        return math.exp(max(-_MOST_SHIFT, min(_MOST_SHIFT, self._surplus / self._variance)))

    def add(self, surplus: float, variance: float) -> None:
        """`surplus`: accepted drafts less expected ones."""
        self._surplus = _KEEP_OWN * self._surplus + surplus
        self._variance = _KEEP_OWN * self._variance + variance + 0.25 * _OWN_WEIGHT * (1.0 - _KEEP_OWN)


class AcceptanceRates:
    """Of `most` draft positions and all classes. `rates` [most, classes] and odds are as of the last `update`."""

    def __init__(self, most: int) -> None:
        self._hits = [[0.0] * (UNKNOWN + 1) for _ in range(most)]
        self._tries = [[0.0] * (UNKNOWN + 1) for _ in range(most)]
        self._weight = 1.0
        self._samples = np.repeat(np.arange(_NUM_SAMPLES)[:, None] % UNKNOWN, most, axis=1)
        self._next_sample = self._num_steps = 0
        self.update()

    def update(self) -> None:
        hits, tries = np.array(self._hits) / self._weight, np.array(self._tries) / self._weight
        guess, rates = np.array(_FIRST_GUESSES), []
        for hit, tried in zip(hits, tries, strict=True):
            rates.append((hit + _GUESS_WEIGHT * guess) / (tried + _GUESS_WEIGHT))
            guess = rates[-1] * _LATER
        self.rates = np.array(rates)
        self._odds = self.rates / (1.0 - self.rates)
        self._listed: list[list[float]] = self.rates.tolist()

    def drafted(self, classes_RK: IntArray) -> None:
        """The drafts of a step, whether they will be verified or not."""
        num, drafts = classes_RK.shape
        count, self._num_steps = min(num, _SAMPLES_OF_STEP), self._num_steps + 1
        taken = classes_RK[(self._num_steps * count + np.arange(count)) % num]
        places = (self._next_sample + np.arange(count)) % _NUM_SAMPLES
        self._next_sample = int(places[-1]) + 1
        self._samples[places, :drafts] = taken
        self._samples[places, drafts:] = taken[:, -1:]

    def verified(self, own: OwnFactor, classes: Sequence[int], num_accepted: int) -> None:
        """`classes`: of the verified drafts. Those after the first wrong one were not tried."""
        weight = self._weight = self._weight / _KEEP_ALL
        surplus = variance = 0.0
        for position, margin_class in enumerate(classes[: min(num_accepted + 1, len(self._hits))]):
            self._tries[position][margin_class] += weight
            accepted, rate = position < num_accepted, self._listed[position][margin_class]
            self._hits[position][margin_class] += weight * accepted
            surplus, variance = surplus + accepted - rate, variance + rate * (1.0 - rate)
        own.add(surplus, variance)
        if weight > _HEAVIEST:
            self._hits = [[count / weight for count in counts] for counts in self._hits]
            self._tries = [[count / weight for count in counts] for counts in self._tries]
            self._weight = 1.0

    def survival(self, factors_R: FloatArray, classes_RK: IntArray) -> FloatArray:
        """The probability [R, K] that a draft and all before it are accepted."""
        odds = self._odds[np.arange(classes_RK.shape[1]), classes_RK] * factors_R[:, None]
        survival: FloatArray = np.minimum(odds / (1.0 + odds), _HIGHEST).cumprod(axis=1)
        return survival

    def expected(self, factors_R: FloatArray) -> FloatArray:
        """`survival` of drafts not made yet: [R, S, most], S equally likely cases for each request."""
        num = len(factors_R)
        each = max(1, _NUM_SAMPLES // num)
        taken = self._samples[np.arange(num * each) % _NUM_SAMPLES]
        return self.survival(np.repeat(factors_R, each), taken).reshape(num, each, -1)

"""Seconds of a forward, fitted to recent ones.

For the target: a + b x rows + c x requests + d x context + e x (rows x their context), and more per row beyond some
numbers. For the drafter: a + b x rows + c if it drafts + d x passes + e x drafts. Least squares of relative errors,
with coefficients of at least 0; one that recent forwards do not determine keeps its value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_KEEP = 0.99
_INERTIA = 0.05
# A forward counts as at most this many times its predicted time.
_DISTURBED = 3.0
_SWEEPS = 40


class LinearCost:
    """`scales`: typical values of the parts."""

    def __init__(self, scales: Sequence[float]) -> None:
        self._scales = np.array(scales, dtype=np.float64)
        num = len(scales)
        self._coefficients, self._squares, self._products = np.zeros(num), np.zeros((num, num)), np.zeros(num)
        self.num_seen = 0

    def observe(self, parts: Sequence[float], seconds: float) -> None:
        if seconds <= 0:
            return  # the clock is too coarse
        scaled = np.array(parts) / self._scales
        expected = float(scaled @ self._coefficients)
        if expected > 0:
            seconds = min(seconds, _DISTURBED * expected)
        scaled /= seconds
        self._squares = _KEEP * self._squares + np.outer(scaled, scaled)
        self._products = _KEEP * self._products + scaled
        self.num_seen += 1

    def fit(self) -> None:
        old = self._coefficients
        inertia = _INERTIA * np.maximum(self._squares.diagonal(), 1e-12)
        squares, products = self._squares + np.diag(inertia), self._products + inertia * old
        rows, wanted, coefficients = squares.tolist(), products.tolist(), old.tolist()
        for _ in range(_SWEEPS):
            for i, row in enumerate(rows):
                left = wanted[i] - sum(map(operator.mul, row, coefficients))
                coefficients[i] = max(0.0, coefficients[i] + left / row[i])
        self._coefficients = np.array(coefficients)

    def each(self) -> FloatArray:
        return self._coefficients / self._scales

    def seconds(self, parts: Sequence[float]) -> float:
        return float(np.array(parts) @ self.each())


class FewRows:
    """Factors on the linear model's seconds for few rows: kernels compute rows in groups, so four may cost less than
    three. From twice the last of `MEASURED` on the factor is 1."""

    MEASURED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)

    def __init__(self) -> None:
        self._rows, self._factors = np.array([1.0]), np.array([1.0])

    def fit(self, seconds: Mapping[int, float]) -> None:
        """`seconds`: of a forward, by its number of rows. Fewer than three say nothing about a line."""
        if len(seconds) < 3 or min(seconds.values()) <= 0:
            return
        rows, measured = np.array(sorted(seconds.items())).T
        slope, base = np.polyfit(rows, measured, 1)
        if base < 0.0:
            slope, base = rows @ measured / (rows @ rows), 0.0
        elif slope < 0.0:
            slope, base = 0.0, measured.mean()
        self._rows = np.append(rows, 2 * rows[-1])
        self._factors = np.append(measured / (base + slope * rows), 1.0)

    def of(self, num_rows: npt.ArrayLike) -> FloatArray:
        factors: FloatArray = np.interp(np.asarray(num_rows), self._rows, self._factors)
        return factors

"""Measured durations as a function of a number of tokens."""

from __future__ import annotations

# Weight of the last measurement.
_WEIGHT = 0.2


class TokenPace:
    """A line fitted to measured durations by tokens: a fixed part and a part per token.

    The first measurement includes connecting, and is ignored. `least`: measurements before anything is predicted.
    """

    def __init__(self, least: int = 2) -> None:
        self._least = least
        self.num_measured = 0
        self.num_passed_over = 0
        self._tokens = self._seconds = self._squares = self._products = 0.0

    def measure(self, seconds: float, num_tokens: int) -> None:
        self.num_measured += 1
        if self.num_measured < 2:
            return
        # A plain mean at first.
        weight = max(_WEIGHT, 1.0 / (self.num_measured - 1))
        self._tokens += weight * (num_tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (num_tokens**2 - self._squares)
        self._products += weight * (seconds * num_tokens - self._products)

    @property
    def per_token(self) -> float | None:
        line = self._line()
        return None if line is None else line[1]

    def predict(self, num_tokens: int) -> float | None:
        """Seconds for `num_tokens`; None before enough was measured."""
        line = self._line()
        return None if line is None else line[0] + line[1] * num_tokens

    def _line(self) -> tuple[float, float] | None:
        """Seconds for no token, and per token: neither below 0."""
        if self.num_measured < self._least:
            return None
        spread = self._squares - self._tokens**2
        if spread > 0.01 * self._squares:
            slope = (self._products - self._tokens * self._seconds) / spread
            base = self._seconds - slope * self._tokens
            if slope < 0.0:
                return self._seconds, 0.0
            if base >= 0.0:
                return base, slope
        return 0.0, self._products / self._squares

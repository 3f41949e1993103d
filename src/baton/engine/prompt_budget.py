"""Bounds the gap of running streams: how many prompt tokens a step with decodes may compute."""

from __future__ import annotations

# Tokens of smaller chunks cost more.
_LEAST_CHUNK = 32
# Prompt tokens of a step before anything was measured.
_FIRST_CHUNK = 256
# The most by which a measured time may rise at once: another process may have caused it.
_RISE = 1.5


class PromptBudget:
    """Prompt tokens in a step with decodes: for `bound_s`, or twice the decodes' time. `most`: None: any."""

    def __init__(self, bound_s: float, most: int | None = None) -> None:
        self._bound_s, self._max_tokens = bound_s, most
        self._decode_s = self._token_s = 0.0

    def computed(self, num_prompt_tokens: int, decodes: bool, seconds: float) -> None:
        """Record the time of a step. `decodes`: it decoded too."""
        if num_prompt_tokens == 0:
            self._decode_s = _rise_limited(self._decode_s, seconds)
        elif num_prompt_tokens >= _LEAST_CHUNK or not self._token_s:
            prompt_s = max(seconds - self._decode_s, seconds / 4) if decodes else seconds
            self._token_s = _rise_limited(self._token_s, prompt_s / num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        budget = _FIRST_CHUNK
        if self._token_s:
            seconds = max(self._bound_s - self._decode_s, self._decode_s)
            budget = max(int(seconds / self._token_s) // _LEAST_CHUNK, 1) * _LEAST_CHUNK
        return budget if self._max_tokens is None else min(budget, self._max_tokens)


def _rise_limited(old: float, new: float) -> float:
    return min(new, _RISE * old) if old else new

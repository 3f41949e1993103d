"""The tokens that would complete one of a request's `bad_words`, as in vLLM.

They depend only on the output, so an engine that takes over a request derives the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class BadWords:
    """`words`: token ids of each. Not thread-safe; follows one output by `advance`."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for *before, last in words:
            self._last[tuple(before)].append(last)
        self._lengths = sorted({len(before) for before in self._last})
        self._tail: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def advance(self, token_ids: Sequence[int]) -> None:
        if self._lengths:
            tail = [*self._tail, *token_ids]
            self._tail = tail[max(0, len(tail) - self._lengths[-1]) :]

    def barred(self, drafts_before: Sequence[int]) -> list[int]:
        known = [*self._tail, *drafts_before]
        ends = (tuple(known[len(known) - length :]) for length in self._lengths if length <= len(known))
        return [token for end in ends for token in self._last.get(end, ())]

"""Stop strings in a stream of text. A match may span pieces, so text that may become a match is held back.

Knuth-Morris-Pratt visits each character once per stop string. The stop string that is complete first ends the text; of
two that end together, the longer one.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence


class StopChecker:
    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: end the text after the stop string, not before it."""
        self._stop = tuple(stop)
        # Kept here, since the cache may evict the tables.
        self._borders = [_borders(text) for text in self._stop]
        self._include = include_stop
        # Per stop string: the length of its longest prefix that the text ends with.
        self._num_matched = [0] * len(self._stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, armed: bool = True) -> str:
        """Sets `matched` when a stop string is complete; push no more then. `armed` false (before min_tokens): complete
        stop strings are ordinary text.
        """
        if not self._stop:
            return piece
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            matched = self._advance(text[end - 1])
            if armed and matched is not None:
                self.matched, self._held = matched, ""
                return text[:end] if self._include else text[: end - len(matched)]
        pending = max(
            borders[-1] if number == len(borders) else number
            for borders, number in zip(self._borders, self._num_matched, strict=True)
        )
        shown = len(text) - pending
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held text, at the end without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """The longest stop string that `character` completes, if any."""
        longest: str | None = None
        for index, stop in enumerate(self._stop):
            number = self._num_matched[index]
            if number and (number == len(stop) or stop[number] != character):
                borders = self._borders[index]
                number = borders[number - 1]
                while number and stop[number] != character:
                    number = borders[number - 1]
            if stop[number] == character:
                number += 1
            self._num_matched[index] = number
            if number == len(stop) and (longest is None or number > len(longest)):
                longest = stop
        return longest


@functools.lru_cache(maxsize=64)  # a request's choices have the same stop strings
def _borders(text: str) -> array[int]:
    """Per prefix: the length of its longest proper suffix that is also a prefix."""
    borders = array("I", [0]) * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        if text[end] == text[length]:
            length += 1
        borders[end] = length
    return borders

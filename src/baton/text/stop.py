"""Stop strings over a stream of text: a match may span pieces, and none of it may be shown too early.

Each character is looked at once per stop string (Knuth, Morris, Pratt), so the work does not depend on how the text is
cut into pieces, and neither does the answer: the stop string that is complete first ends the text, of two that end with
the same character the longer one.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence


class StopChecker:
    """Finds the first stop string in one growing text, holding back what may become one."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the text ends after the stop string instead of before it."""
        self._stop = tuple(stop)
        # Kept here because other requests' stop strings may evict the tables from the cache.
        self._borders = [_borders(text) for text in self._stop]
        self._include = include_stop
        # How many characters of each stop string the text ends with.
        self._num_matched = [0] * len(self._stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, armed: bool = True) -> str:
        """Add text and return what may be shown.

        Sets `matched` when a stop string is complete; then stop pushing.

        With `armed=False` (fewer than min_tokens so far) complete stop strings pass as ordinary text.
        """
        if not self._stop:
            return piece
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            found = self._advance(text[end - 1])
            if armed and found is not None:
                self.matched, self._held = found, ""
                return text[:end] if self._include else text[: end - len(found)]
        pending = max(
            borders[-1] if number == len(borders) else number
            for borders, number in zip(self._borders, self._num_matched, strict=True)
        )
        shown = len(text) - pending
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return what was held back; for the end of the sequence without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Add one character; the longest stop string that it completes."""
        found: str | None = None
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
            if number == len(stop) and (found is None or number > len(found)):
                found = stop
        return found


@functools.lru_cache(maxsize=64)  # the choices of a request share them
def _borders(text: str) -> array[int]:
    """For each start of `text`: the length of its longest proper end that is a start too."""
    borders = array("I", [0]) * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        if text[end] == text[length]:
            length += 1
        borders[end] = length
    return borders

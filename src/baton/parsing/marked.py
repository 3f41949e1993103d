"""What parsers of calls share whose calls stand among words, each behind a marker."""

from __future__ import annotations

from abc import ABC, abstractmethod

from baton.parsing.base import ParsedEvent, Words, split_at


class MarkedParser(ABC):
    """Words up to a marker. What follows it is a parser's own, in states of its own, until its state is "words" again.

    `_held`: text that is not understood before more of it comes.
    """

    def __init__(self, *markers: str) -> None:
        self.markers = markers
        self._words = Words()
        self._held = ""
        self._where = "words"

    def push(self, text: str) -> list[ParsedEvent]:
        text, self._held = self._held + text, ""
        events: list[ParsedEvent] = []
        while text:
            rest: str | None = None
            if self._where == "words":
                before, found, text = split_at(text, *self.markers)
                events += self._words.push(before)
                if found:
                    self._opened(found)
                    continue
            else:
                rest = self._read(text, events)
            if rest is None:
                self._held = text
                break
            text = rest
        return events

    @abstractmethod
    def _opened(self, marker: str) -> None:
        """A marker was read: enter the state behind it."""

    @abstractmethod
    def _read(self, text: str, events: list[ParsedEvent]) -> str | None:
        """Read some of the text outside words: add to `events`, and return what is left; None until more comes."""

"""Base class of parsers for formats in which a marker begins each call."""

from __future__ import annotations

from abc import ABC, abstractmethod

from baton.parsing.base import ContentBuffer, ParsedEvent, split_at


class MarkedParser(ABC):
    """Text before a marker is content. The subclass parses the text after it, until it sets `_where` to "words" again.
    `_held`: text that cannot be parsed yet."""

    def __init__(self, *markers: str) -> None:
        self.markers = markers
        self._content = ContentBuffer()
        self._held = ""
        self._where = "words"

    def push(self, text: str) -> list[ParsedEvent]:
        text, self._held = self._held + text, ""
        events: list[ParsedEvent] = []
        while text:
            rest: str | None = None
            if self._where == "words":
                before, found, text = split_at(text, *self.markers)
                events += self._content.push(before)
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
    def _opened(self, marker: str) -> None: ...
    @abstractmethod
    def _read(self, text: str, events: list[ParsedEvent]) -> str | None:
        """Parse text after a marker: add to `events`, and return the rest. None: more text is needed."""

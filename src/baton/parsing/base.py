"""Streaming parsers that split a model's text into content, reasoning and tool calls.

The result does not depend on how the text is cut: text that may become a marker is held back. Malformed calls become
content, so no text is lost, and no text ends a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of tool call number `index`. Only the first part has `name`. `arguments`: JSON as the model wrote it."""

    index: int
    name: str | None
    arguments: str


ParsedEvent = Content | Reasoning | CallDelta


class Parser(Protocol):
    """Parses one answer."""

    def push(self, text: str) -> list[ParsedEvent]:
        """Add text. Returns the events that are certain."""
        ...

    def finish(self) -> list[ParsedEvent]:
        """End the answer. Returns the events of held text."""
        ...


class Words:
    """Makes `Content` from text, without the white space before and after calls."""

    def __init__(self) -> None:
        self._held = ""
        self._behind_call = False

    def push(self, text: str) -> list[ParsedEvent]:
        """Trailing white space is held back, because a call may follow."""
        text = self._held + text
        words = text.rstrip()
        self._held = text[len(words) :]
        if self._behind_call and words:
            words = words.lstrip()
            self._behind_call = False
        return [Content(words)] if words else []

    def call(self) -> None:
        """A call begins or ends here: drop the white space around it."""
        self._held, self._behind_call = "", True

    def finish(self) -> list[ParsedEvent]:
        held, self._held = self._held, ""
        return [Content(held)] if held and not self._behind_call else []


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """Split `text` into the part before the first marker, the marker, and the rest. Without a marker the rest is a tail
    that may begin one."""
    found = min((m for m in markers if m in text), key=text.index, default="")
    if found:
        before, _, behind = text.partition(found)
        return before, found, behind
    for size in range(min(max(map(len, markers)) - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return text[:-size], "", text[-size:]
    return text, "", ""

"""Streaming parsers that split a model's text into content, reasoning and tool calls.

Text that may become a marker is held back. Malformed calls become content, so no text is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of tool call number `index`. Only the first has `name`. `arguments`: as the model wrote them."""

    index: int
    name: str | None
    arguments: str


ParsedEvent = Content | Reasoning | CallDelta


class Parser(Protocol):
    def push(self, text: str) -> list[ParsedEvent]:
        """Returns the events that are certain."""
        ...

    def finish(self) -> list[ParsedEvent]:
        """Returns the events of held text."""
        ...


class ContentBuffer:
    """Makes `Content` from the text around calls. White space next to a call is dropped, because templates write it
    there.
    """

    def __init__(self) -> None:
        self._held = ""
        self._begun = self._after_call = False

    def push(self, text: str) -> list[ParsedEvent]:
        """Leading white space is held back: a call may follow."""
        text, self._held = self._held + text, ""
        self._begun |= bool(text.strip())
        if not self._begun:
            self._held = text
        return [Content(text)] if self._begun and text else []

    def call(self) -> None:
        self._held, self._begun, self._after_call = "", False, True

    def finish(self) -> list[ParsedEvent]:
        held, self._held = self._held, ""
        return [Content(held)] if held and not self._after_call else []


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """The part before the first marker, the marker, and the rest. Without a marker the rest is a tail that may begin
    one."""
    first = min((m for m in markers if m in text), key=text.index, default="")
    if first:
        before, _, rest = text.partition(first)
        return before, first, rest
    for size in range(min(max(map(len, markers)) - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return text[:-size], "", text[-size:]
    return text, "", ""

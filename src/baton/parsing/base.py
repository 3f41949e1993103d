"""What a model's text holds beside its words: calls of tools, and reasoning. Text in, in any pieces; events out.

A parser's events depend on the text alone and not on how it was cut: what could become a marker is held back until it
is known to be one or not. Text that looks like a call and is none stays content, so that nothing a model writes is lost
and nothing it writes ends a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Words that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of call number `index` of an answer. The first of a call has its `name`; `arguments` are pieces of JSON, as
    the model wrote it."""

    index: int
    name: str | None
    arguments: str


ParsedEvent = Content | Reasoning | CallDelta


class Parser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[ParsedEvent]:
        """What more text says."""
        ...

    def finish(self) -> list[ParsedEvent]:
        """What was held back. Nothing may be pushed after it."""
        ...


class Words:
    """Content as it comes, but for white space next to a call: it is held back until other words follow it."""

    def __init__(self) -> None:
        self._held = ""
        self._behind_call = False

    def push(self, text: str) -> list[ParsedEvent]:
        """Content; trailing white space is kept for later."""
        text = self._held + text
        words = text.rstrip()
        self._held = text[len(words) :]
        if self._behind_call and words:
            words = words.lstrip()
            self._behind_call = False
        return [Content(words)] if words else []

    def call(self) -> None:
        """A call begins or ends here: the white space around it is nobody's."""
        self._held, self._behind_call = "", True

    def finish(self) -> list[ParsedEvent]:
        """What is held back of an answer that ends here."""
        held, self._held = self._held, ""
        return [Content(held)] if held and not self._behind_call else []


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """`text` before the first marker, that marker, and what is behind it; without any, "" and a tail that may begin
    one."""
    found = min((m for m in markers if m in text), key=text.index, default="")
    if found:
        before, _, behind = text.partition(found)
        return before, found, behind
    for size in range(min(max(map(len, markers)) - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return text[:-size], "", text[-size:]
    return text, "", ""

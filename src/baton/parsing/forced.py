"""Parsers for answers that a grammar forces to be calls (`tool_choice` "required" or a named function)."""

from __future__ import annotations

from baton.parsing.base import CallDelta, Content, ContentBuffer, ParsedEvent
from baton.parsing.calls import JsonCalls


class RequiredParser:
    """`[{"name": ..., "parameters": {...}}, ...]`."""

    def __init__(self) -> None:
        self._content = ContentBuffer()
        self._calls = JsonCalls(self._content)
        self._inside = False
        self._separators = ""
        self._failed = False  # the last call was malformed: what follows is content

    def push(self, text: str) -> list[ParsedEvent]:
        events: list[ParsedEvent] = []
        while text:
            if not self._inside:
                rest = text.lstrip(" \t\r\n[,]")
                separators, text = text[: len(text) - len(rest)], rest
                if self._failed:
                    events += self._content.push(separators)
                else:
                    self._separators += separators
                if not text:
                    break
                self._calls.begin(self._separators)
                self._inside, self._separators = True, ""
            more, text, is_call = self._calls.push(text)
            events += more
            self._inside, self._failed = is_call is None, is_call is False
        return events

    def finish(self) -> list[ParsedEvent]:
        return (self._calls.finish() if self._inside else []) + self._content.finish()


class NamedParser:
    """The answer is one function's arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[ParsedEvent]:
        if not text:
            return []
        name, self._name = self._name, None
        return [CallDelta(0, name, text)]

    def finish(self) -> list[ParsedEvent]:
        return []


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[ParsedEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParsedEvent]:
        return []

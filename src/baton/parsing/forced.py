"""Parsers for answers that a grammar forces to be calls (`tool_choice` "required" or a named function)."""

from __future__ import annotations

from baton.parsing.base import CallDelta, Content, ParsedEvent, Words
from baton.parsing.calls import JsonCalls


class RequiredParser:
    """`[{"name": ..., "parameters": {...}}, ...]`."""

    def __init__(self) -> None:
        self._words = Words()
        self._calls = JsonCalls(self._words)
        self._inside = False

    def push(self, text: str) -> list[ParsedEvent]:
        events: list[ParsedEvent] = []
        while text:
            if not self._inside:
                text = text.lstrip(" \t\r\n[,]")
                if not text:
                    break
                self._calls.begin("")
                self._inside = True
            more, text, is_call = self._calls.push(text)
            events += more
            self._inside = is_call is None
        return events

    def finish(self) -> list[ParsedEvent]:
        return (self._calls.finish() if self._inside else []) + self._words.finish()


class NamedParser:
    """Only the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[ParsedEvent]:
        if not text:
            return []
        name, self._name = self._name, None
        return [CallDelta(0, name, text)]

    def finish(self) -> list[ParsedEvent]:
        return []


class Plain:
    """All text is content."""

    def push(self, text: str) -> list[ParsedEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParsedEvent]:
        return []

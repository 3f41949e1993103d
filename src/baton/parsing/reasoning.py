"""Reasoning between `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from baton.parsing.base import ParsedEvent, Parser, Reasoning, split_at

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkParser:
    """Reasoning first, if the answer begins with it, then what `rest` reads. `begun`: the prompt has opened it."""

    def __init__(self, rest: Parser, begun: bool) -> None:
        self._rest = rest
        self._begun = begun
        self._where = "start"
        self._held = ""

    def push(self, text: str) -> list[ParsedEvent]:
        if self._where == "behind":
            return self._rest.push(text)
        text, self._held = self._held + text, ""
        if self._where == "start":
            lead = text.lstrip()
            if _OPEN.startswith(lead) and lead != _OPEN:
                self._held = text
                return []
            if not lead.startswith(_OPEN) and not self._begun:
                self._where = "behind"
                return self._rest.push(text)
            # A prompt may have opened the reasoning that the model opens again.
            self._where, text = "inside", lead.removeprefix(_OPEN) if lead.startswith(_OPEN) else text
        events: list[ParsedEvent] = []
        if self._where == "inside":
            before, found, text = split_at(text, _CLOSE)
            if before:
                events.append(Reasoning(before))
            if not found:
                self._held = text
                return events
            self._where = "gap"
        text = text.lstrip()
        if text:
            self._where = "behind"
            events += self._rest.push(text)
        return events

    def finish(self) -> list[ParsedEvent]:
        events: list[ParsedEvent] = []
        if self._held and (self._where == "inside" or self._begun):
            events.append(Reasoning(self._held))
        elif self._held:
            events += self._rest.push(self._held)
        return events + self._rest.finish()

"""Parses reasoning between `<think>` and `</think>` at the beginning of an answer."""

from __future__ import annotations

from baton.parsing.base import ParsedEvent, Parser, Reasoning, split_at
from baton.parsing.marked import MarkedParser

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkParser:
    """Parses reasoning, then passes the answer to `rest`. `begun`: the prompt ends within the reasoning. `to_call`: a
    call also ends it, as in vLLM's `qwen3`, because these models may leave out `</think>` before a call."""

    def __init__(self, rest: Parser, begun: bool, to_call: bool = False) -> None:
        self._rest = rest
        self._calls = rest.markers[:1] if to_call and isinstance(rest, MarkedParser) else ()
        self._begun = begun
        self._where = "start"
        self._held = ""

    def push(self, text: str) -> list[ParsedEvent]:
        if self._where == "after":
            return self._rest.push(text)
        text, self._held = self._held + text, ""
        if self._where == "start":
            lead = text.lstrip()
            if _OPEN.startswith(lead) and lead != _OPEN:
                self._held = text
                return []
            if not lead.startswith(_OPEN) and not self._begun:
                self._where = "after"
                return self._rest.push(text)
            # The model may write `<think>` again after a prompt that ends with it.
            self._where, text = "inside", lead.removeprefix(_OPEN) if lead.startswith(_OPEN) else text
        events: list[ParsedEvent] = []
        if self._where == "inside":
            before, found, text = split_at(text, _CLOSE, *self._calls)
            if before:
                events.append(Reasoning(before))
            if not found:
                self._held = text
                return events
            self._where = "after"
            if found != _CLOSE:
                text = found + text
            events += self._rest.push(text)
        return events

    def finish(self) -> list[ParsedEvent]:
        events: list[ParsedEvent] = []
        if self._held and (self._where == "inside" or self._begun):
            events.append(Reasoning(self._held))
        elif self._held:
            events += self._rest.push(self._held)
        return events + self._rest.finish()

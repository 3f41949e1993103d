"""Parses JSON calls into events."""

from __future__ import annotations

from baton.parsing.base import CallDelta, ContentBuffer, ParsedEvent
from baton.parsing.json_call import JsonCall


class JsonCalls:
    """JSON calls one after another. Text that is no call goes to `words`."""

    def __init__(self, content: ContentBuffer) -> None:
        self.count = 0
        self._content = content
        self._call = JsonCall()
        self._lead = ""
        self._named = False

    def begin(self, lead: str) -> None:
        """`lead`: the marker before a possible call, which becomes content if there is none."""
        self._call, self._lead, self._named = JsonCall(), lead, False

    def push(self, text: str) -> tuple[list[ParsedEvent], str, bool | None]:
        """Returns events, the text after the call, and whether it was a valid call (None: not ended)."""
        for at, char in enumerate(text, 1):
            self._call.push(char)
            if self._call.state == "failed":
                return self._drop(), text[at:], False
            if self._call.state == "done":
                events = self._deltas()
                self.count += 1
                self._content.call()
                return events, text[at:], True
        return self._deltas(), "", None

    def _deltas(self) -> list[ParsedEvent]:
        name, pieces = self._call.name, self._call.take()
        if name is None or not pieces:
            return []
        if not self._named:
            self._content.call()
        first, self._named = not self._named, True
        return [CallDelta(self.count, name if first else None, pieces)]

    def _drop(self) -> list[ParsedEvent]:
        if self._named:
            # Its name was sent already.
            events = self._deltas()
            self.count += 1
            return events
        return self._content.push(self._lead + self._call.raw)

    def finish(self) -> list[ParsedEvent]:
        return self._deltas() if self._named else self._drop()

"""What parsers of calls share: the numbers of calls, and a JSON call among them."""

from __future__ import annotations

from baton.parsing.base import CallDelta, ParsedEvent, Words
from baton.parsing.json_call import JsonCall


class JsonCalls:
    """Reads JSON calls one after another into events. `words` get what turns out to be none."""

    def __init__(self, words: Words) -> None:
        self.count = 0
        self._words = words
        self._call = JsonCall()
        self._lead = ""
        self._told = False

    def begin(self, lead: str) -> None:
        """A call may begin here, behind the text `lead`."""
        self._call, self._lead, self._told = JsonCall(), lead, False

    def push(self, text: str) -> tuple[list[ParsedEvent], str, bool | None]:
        """Events, the text behind the call, and whether it is one: None while it is not over."""
        for at, char in enumerate(text, 1):
            self._call.push(char)
            if self._call.state == "failed":
                return self._drop(), text[at:], False
            if self._call.state == "done":
                events = self._tell()
                self.count += 1
                self._words.call()
                return events, text[at:], True
        return self._tell(), "", None

    def _tell(self) -> list[ParsedEvent]:
        name, pieces = self._call.name, self._call.take()
        if name is None or not pieces:
            return []
        if not self._told:
            self._words.call()
        first, self._told = not self._told, True
        return [CallDelta(self.count, name if first else None, pieces)]

    def _drop(self) -> list[ParsedEvent]:
        if self._told:
            # The client has its name: what is there of it stays a call.
            events = self._tell()
            self.count += 1
            return events
        return self._words.push(self._lead + self._call.raw)

    def finish(self) -> list[ParsedEvent]:
        """The answer ends within a call."""
        return self._tell() if self._told else self._drop()

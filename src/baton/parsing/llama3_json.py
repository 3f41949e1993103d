"""`llama3_json`: the whole answer is `{"name": ..., "parameters": {...}}`, or several of them separated by `;` (Llama
3.1 to 3.3). `<|python_tag|>` may come first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.parsing.base import ContentBuffer, ParsedEvent
from baton.parsing.calls import JsonCalls

_TAG = "<|python_tag|>"


class Llama3JsonParser:
    """Calls from the first character on. After anything else, the rest is content."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._content = ContentBuffer()
        self._calls = JsonCalls(self._content)
        self._held = ""
        self._where = "start"

    def push(self, text: str) -> list[ParsedEvent]:
        text, self._held = self._held + text, ""
        events: list[ParsedEvent] = []
        while text:
            if self._where == "words":
                return events + self._content.push(text)
            if self._where == "call":
                more, text, is_call = self._calls.push(text)
                events += more
                if is_call is not None:
                    self._where = "between" if is_call else "words"
                continue
            lead = text.lstrip(" \t\r\n;," if self._where == "between" else None)
            tagged = lead.removeprefix(_TAG).lstrip()
            if tagged.startswith("{"):
                self._calls.begin(text[: len(text) - len(tagged)])
                self._where, text = "call", tagged
            elif not tagged or (lead and _TAG.startswith(lead)):
                self._held = text
                break
            else:
                self._where = "words"
        return events

    def finish(self) -> list[ParsedEvent]:
        if self._where == "call":
            return self._calls.finish() + self._content.finish()
        if self._where == "between":
            self._held = self._held.strip(" \t\r\n;,")
        return self._content.push(self._held) + self._content.finish()

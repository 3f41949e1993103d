"""`hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes 2 Pro, Qwen 2.5 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.parsing.base import Event, Words, split_at
from baton.parsing.calls import JsonCalls

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Calls and words in any order."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._words = Words()
        self._calls = JsonCalls(self._words)
        self._held = ""
        self._where = "words"

    def push(self, text: str) -> list[Event]:
        text, self._held = self._held + text, ""
        events: list[Event] = []
        while text:
            if self._where == "words":
                before, found, text = split_at(text, _OPEN)
                events += self._words.push(before)
                if not found:
                    self._held = text
                    break
                self._where = "call"
                self._calls.begin(_OPEN)
            elif self._where == "call":
                more, text, is_call = self._calls.push(text)
                events += more
                if is_call is not None:
                    self._where = "close" if is_call else "words"
            else:
                stripped = text.lstrip()
                if stripped.startswith(_CLOSE) or not _CLOSE.startswith(stripped):
                    self._where, text = "words", stripped.removeprefix(_CLOSE)
                else:
                    self._held = text
                    break
        return events

    def finish(self) -> list[Event]:
        if self._where == "call":
            return self._calls.finish() + self._words.finish()
        held = "" if self._where == "close" and not self._held.strip() else self._held
        return self._words.push(held) + self._words.finish()

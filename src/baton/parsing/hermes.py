"""`hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.parsing.base import ParsedEvent
from baton.parsing.calls import JsonCalls
from baton.parsing.marked import MarkedParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedParser):
    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(_OPEN)
        self._calls = JsonCalls(self._content)

    def _opened(self, marker: str) -> None:
        self._where = "call"
        self._calls.begin(_OPEN)

    def _read(self, text: str, events: list[ParsedEvent]) -> str | None:
        if self._where == "call":
            more, text, is_call = self._calls.push(text)
            events += more
            if is_call is not None:
                self._where = "close" if is_call else "words"
            return text
        stripped = text.lstrip()
        if _CLOSE.startswith(stripped) and stripped != _CLOSE:
            return None
        self._where = "words"
        return stripped.removeprefix(_CLOSE) if stripped.startswith(_CLOSE) else text

    def finish(self) -> list[ParsedEvent]:
        if self._where == "call":
            return self._calls.finish() + self._content.finish()
        held = "" if self._where == "close" and not self._held.strip() else self._held
        return self._content.push(held) + self._content.finish()

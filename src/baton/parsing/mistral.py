"""`mistral`: after `[TOOL_CALLS]`, a list of `{"name": ..., "arguments": {...}}`. Mistral's tokenizers from version 11
on: `NAME{...}`, `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`, each after its own `[TOOL_CALLS]`. The model's ID
is dropped: the API server makes call ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.parsing.base import CallDelta, ParsedEvent
from baton.parsing.calls import JsonCalls
from baton.parsing.json_call import JsonValue
from baton.parsing.marked import MarkedParser

_OPEN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
_ID = re.compile(r"\[CALL_ID\][A-Za-z0-9_-]{0,256}")


def _begins(marker: str, text: str) -> bool:
    return marker.startswith(text) and marker != text


class MistralParser(MarkedParser):
    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(_OPEN)
        self._calls = JsonCalls(self._content)
        self._value = JsonValue()

    def _opened(self, marker: str) -> None:
        self._where = "start"

    def _read(self, text: str, events: list[ParsedEvent]) -> str | None:
        states = {"start": self._start, "arguments": self._arguments, "call": self._call, "list": self._list}
        return states[self._where](text, events)

    def _start(self, text: str, events: list[ParsedEvent]) -> str | None:
        rest = text.lstrip()
        if rest.startswith("[") and not _ARGS.startswith(rest):
            self._calls.begin(_OPEN + text[: len(text) - len(rest) + 1])
            self._where = "call"
            return rest[1:]
        name = _NAME.match(rest)
        after = rest[name.end() :] if name else ""
        if not rest or rest == "[" or (name and any(_begins(marker, after) for marker in (_CALL_ID, _ARGS))):
            return None
        if (given := _ID.match(after)) is not None:
            after = after[given.end() :]
            if _begins(_ARGS, after):
                return None
        after = after.removeprefix(_ARGS).lstrip()
        if name and (not after or after.startswith("{")):
            if not after:
                return None
            self._content.call()
            events.append(CallDelta(self._calls.count, name.group(), ""))
            self._value, self._where = JsonValue(), "arguments"
            return after
        events += self._content.push(_OPEN)
        self._where = "words"
        return text

    def _arguments(self, text: str, events: list[ParsedEvent]) -> str:
        before = len(self._value.text)
        for char in text:
            self._value.push(char)
            if self._value.done:
                break
        more = self._value.text[before:]
        events.append(CallDelta(self._calls.count, None, more))
        if self._value.done:
            self._calls.count += 1
            self._content.call()
            self._where = "words"
        return text[len(more) :]

    def _call(self, text: str, events: list[ParsedEvent]) -> str:
        more, text, is_call = self._calls.push(text)
        events += more
        if is_call is not None:
            self._where = "list" if is_call else "words"
        return text

    def _list(self, text: str, events: list[ParsedEvent]) -> str:
        """Parse the rest of a list after one of its calls."""
        rest = text.lstrip()
        if rest.startswith(","):
            self._calls.begin(",")
            self._where = "call"
            return rest[1:]
        if rest:
            self._where = "words"
            return rest.removeprefix("]")
        return ""

    def finish(self) -> list[ParsedEvent]:
        if self._where == "call":
            return self._calls.finish() + self._content.finish()
        lead = _OPEN if self._where == "start" else ""
        return self._content.push(lead + self._held) + self._content.finish()

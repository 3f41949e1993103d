"""`qwen3_xml`: `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` (Qwen 3 Coder).
Values become JSON by the function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.parsing.base import CallDelta, ParsedEvent
from baton.parsing.marked import MarkedParser
from baton.parsing.schema_types import parameter_schema, value_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BARE = "<function="
_NAME, _MAX_NAME = re.compile(r"[^<>\s]*"), 256
_VALUE, _VALUE_END = "<parameter=", "</parameter>"
_FUNCTION = re.compile(r"\s*<function=([^<>\s]{1,256})>")
# Models may leave out `</parameter>`, and end the line instead of the tag.
_BEGUN = r"\s*<parameter=([^<>\n]{1,256})(?:\s*>|\n)(.*?)"
_PARAMETER = re.compile(rf"{_BEGUN}(?:</parameter>|(?=<parameter=)|(?=</function>\s*</tool_call>))", re.DOTALL)
_LAST = re.compile(rf"{_BEGUN}</function>\s*\Z", re.DOTALL)
_END = re.compile(r"\s*</function>(\s*</tool_call>)?")


class Qwen3XmlParser(MarkedParser):
    """A call's name is sent at once, and each argument when its value is complete."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(_OPEN, _BARE)
        self._tools = tools
        self._lead = _OPEN
        self._count = 0
        self._name = ""
        self._keys: set[str] = set()

    def push(self, text: str) -> list[ParsedEvent]:
        if self._where == "inside" and self._held.lstrip().startswith(_VALUE):
            tail = self._held[-len(_VALUE_END) :] + text
            if not any(end in tail for end in (_VALUE_END, _VALUE, _CLOSE)):
                self._held += text  # do not scan a long value again for each piece
                return []
        return super().push(text)

    def _opened(self, marker: str) -> None:
        self._where, self._lead = "call", marker

    def _read(self, text: str, events: list[ParsedEvent]) -> str | None:
        if self._where == "inside":
            return self._in_call(text, events)
        return self._unwrapped_call(text, events) if self._lead == _BARE else self._function(text, events)

    def _unwrapped_call(self, text: str, events: list[ParsedEvent]) -> str | None:
        """`<function=` without `<tool_call>` is a call only if it names one of the tools."""
        name = _NAME.match(text)
        if name is not None and name.end() == len(text) and len(text) <= _MAX_NAME:
            return None
        if name is not None and name[0] in self._tools and text.startswith(">", name.end()):
            self._begin(name[0], events)
            return text[name.end() + 1 :]
        self._where = "words"
        events += self._content.push(_BARE)
        return text

    def _function(self, text: str, events: list[ParsedEvent]) -> str | None:
        match = _FUNCTION.match(text)
        if match is None:
            begun = text.lstrip()
            start = "<function="
            if start.startswith(begun) or (begun.startswith(start) and not re.search(r"[<>\s]", begun[len(start) :])):
                return None
            self._where = "words"
            events += self._content.push(_OPEN)
            return text
        self._begin(match[1], events)
        return text[match.end() :]

    def _begin(self, name: str, events: list[ParsedEvent]) -> None:
        self._content.call()
        self._name, self._keys, self._where = name, set(), "inside"
        events.append(CallDelta(self._count, self._name, "{"))

    def _in_call(self, text: str, events: list[ParsedEvent]) -> str | None:
        if ">" not in text:
            return None
        match = _PARAMETER.match(text)
        if match is not None:
            events += self._argument(match)
            return text[match.end() :]
        end = _END.match(text)
        begun = text.lstrip()
        if end is not None and end[1] is None and _CLOSE.startswith(text[end.end() :].lstrip()):
            return None  # `</tool_call>` may follow
        if end is not None or not (begun.startswith(_VALUE) or _may_begin(begun)):
            events.append(CallDelta(self._count, None, "}"))
            self._count += 1
            self._content.call()
            self._where = "words"
            return text if end is None else text[end.end() :]
        return None

    def _argument(self, found: re.Match[str]) -> list[ParsedEvent]:
        key = found[1].strip()
        if key in self._keys:
            return []
        lead = ", " if self._keys else ""
        self._keys.add(key)
        value = self._value(key, found[2])
        return [CallDelta(self._count, None, f"{lead}{json.dumps(key, ensure_ascii=False)}: {value}")]

    def _value(self, key: str, text: str) -> str:
        schema = self._tools.get(self._name)
        return value_of(text.removeprefix("\n").removesuffix("\n"), parameter_schema(schema, key), schema)

    def finish(self) -> list[ParsedEvent]:
        if self._where == "inside":
            # Without `</function>` the call was cut off.
            last = _LAST.match(self._held)
            closed = last is not None or _END.match(self._held) is not None
            return (self._argument(last) if last else []) + ([CallDelta(self._count, None, "}")] if closed else [])
        lead = self._lead if self._where == "call" else ""
        return self._content.push(lead + self._held) + self._content.finish()


def _may_begin(text: str) -> bool:
    return any(start.startswith(text) for start in (_VALUE, "</function>"))

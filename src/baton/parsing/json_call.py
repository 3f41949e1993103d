"""Parses one call as a JSON object, `{"name": ..., "arguments": {...}}`, character by character."""

from __future__ import annotations

import json
from typing import Literal

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_MAX_NAME = 256

_Expected = Literal["open", "key", "colon", "value", "next", "done", "failed"]


class JsonValue:
    """Finds the end of a JSON value by brackets and quotes."""

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self._depth = 0
        self._quoted = self._escaped = False

    def push(self, char: str) -> bool:
        """False if the character is not part of the value: it ended a number or a literal."""
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            self.done = not self._quoted and self._depth == 0
        elif char == '"':
            if self._depth == 0 and self.text:
                self.done = True
                return False
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                self.done = True
                return False
            self._depth -= 1
            self.done = self._depth == 0
        elif self._depth == 0 and (char == "," or char in _SPACE):
            self.done = True
            return False
        self.text += char
        return True


class JsonCall:
    """`raw`: all text read. `name`: None until it is known."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.state: _Expected = "open"
        self._has_arguments = False
        self._pending = ""
        self._key = ""
        self._value = JsonValue()

    def take(self) -> str:
        """The arguments since the last call. Empty until the name is known."""
        if self.name is None:
            return ""
        pending, self._pending = self._pending, ""
        return pending

    def push(self, char: str) -> None:
        """Requires another `state` than "done" or "failed"."""
        self.raw += char
        if self.state in ("open", "key", "colon", "next"):
            self._between(char)
            return
        if not self._value.text and char in _SPACE:
            return
        if self._key in _ARGUMENTS and not self._value.text:
            # A call has its arguments once: an object, or a string with one (Granite 4).
            if char not in '{"' or self._has_arguments:
                self.state = "failed"
                return
            self._has_arguments = True
        mine = self._value.push(char)
        if mine and self._key in _ARGUMENTS and self._value.text[0] == "{":
            self._pending += char
        if self._value.done:
            self._ended()
            if not mine and self.state == "next":
                self._between(char)

    def _between(self, char: str) -> None:
        if self.state == "key" and (self._value.text or char == '"'):
            self._value.push(char)
            if self._value.done:
                self._key, self.state = _string(self._value.text) or "", "colon"
        elif char in _SPACE:
            return
        elif self.state == "open" and char == "{":
            self._value, self.state = JsonValue(), "key"
        elif self.state == "colon" and char == ":":
            self._value, self.state = JsonValue(), "value"
        elif self.state == "next" and char == ",":
            self._value, self.state = JsonValue(), "key"
        elif self.state == "next" and char == "}":
            self.state = "done" if self.name is not None and self._has_arguments else "failed"
        else:
            self.state = "failed"

    def _ended(self) -> None:
        self.state = "next" if self._value.text else "failed"
        if self._key == "name" and self.name is None:
            name = _string(self._value.text)
            if not name or len(name) > _MAX_NAME:
                self.state = "failed"
            else:
                self.name = name
        elif self._key in _ARGUMENTS and self._value.text.startswith('"'):
            arguments = _object_in(self._value.text)
            if arguments is None:
                self.state = "failed"
            else:
                self._pending += arguments


def _object_in(text: str) -> str | None:
    """The object in a JSON string; an empty string counts as an empty object."""
    held = _string(text) if text[1:-1].strip() else "{}"
    try:
        return held if held is not None and isinstance(json.loads(held), dict) else None
    except (ValueError, RecursionError):
        return None


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
        # JSON allows half of a surrogate pair, UTF-8 does not.
        return value if isinstance(value, str) and value.encode() else None
    except ValueError:
        return None

"""The sender of a request, for log lines and for the router's choice of engines."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import msgspec

REQUEST_ID = "X-Request-Id"
SESSION_ID = "X-Session-Id"
_MAX_ID_CHARS = 128
_MAX_TEXT_CHARS = 300
# OpenAI's old and new field.
_USER_FIELDS = ("user", "safety_identifier")


@dataclass(slots=True)
class Caller:
    """`request_id`: the client's `X-Request-Id`, or a generated one. `key`: the number of its API key, from 1. `user`:
    the end user in the request body. `session`: the client's `X-Session-Id`."""

    request_id: str
    address: str | None = None
    key: int | None = None
    user: str | None = None
    session: str | None = None

    def fields(self) -> dict[str, object]:
        return {"request_id": self.request_id, "address": self.address, "key": self.key, "user": self.user}


class _Headers(Protocol):
    def get(self, key: str, default: str) -> str: ...


# Of the current task's request. Tasks inherit it.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def request_id_of(headers: _Headers) -> str:
    """The request's `X-Request-Id`, or a new id if that is missing or not fit for a response."""
    asked = headers.get(REQUEST_ID, "")
    usable = 0 < len(asked) <= _MAX_ID_CHARS and asked.isascii() and asked.isprintable()
    return asked if usable else secrets.token_hex(16)


def session_of(caller: Caller | None) -> str | None:
    """What a conversation's requests have in common: the client's session, or else its end user."""
    return None if caller is None else caller.session or caller.user


def session_in(headers: _Headers) -> str | None:
    """None if `X-Session-Id` is missing or too long."""
    asked = headers.get(SESSION_ID, "")
    return asked if 0 < len(asked) <= _MAX_TEXT_CHARS else None


def note_user(fields: Mapping[str, msgspec.Raw]) -> None:
    caller = CALLER.get()
    if caller is None:
        return
    for name in _USER_FIELDS:
        raw = fields.get(name)
        if raw is not None and len(memoryview(raw)) <= _MAX_TEXT_CHARS:
            value = msgspec.json.decode(memoryview(raw))
            if isinstance(value, str) and value:
                caller.user = caller.user or value


def line_of(fields: Mapping[str, object]) -> str:
    """`name=value ...` without None; what is not one word is quoted."""
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items() if value is not None)


def _word(value: object) -> str:
    text = str(value)
    if len(text) > _MAX_TEXT_CHARS:
        text = f"{text[:_MAX_TEXT_CHARS]}..."
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)

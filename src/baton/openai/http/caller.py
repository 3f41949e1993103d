"""The sender of a request, for log lines and the router's choice of engines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

import msgspec

from baton.errors import RequestError
from baton.wire import MAX_PRIORITY, MAX_WAITED_S

REQUEST_ID = "X-Request-Id"
SESSION_ID = "X-Session-Id"
PRIORITY = "X-Priority"
# Names of llm-d's gateway.
TTFT_SLO_MS = "x-slo-ttft-ms"
TENANT = ("X-Tenant-Id", "x-gateway-inference-fairness-id")
_MAX_ID_CHARS = 128
_MAX_TEXT_CHARS = 300
# OpenAI's old and new field.
_USER_FIELDS = ("user", "safety_identifier")
_NUMBERS = (int, float)
_WORD = re.compile(r"[\w.:,-]{1,100}", re.ASCII)


class Caller(msgspec.Struct):
    """`key`: the number of the API key, from 1. `user`: the end user in the request body. `session`: the client's
    `X-Session-Id`. `claimed`: the tenant that a header names. `priority` and `ttft_slo_s`: as in `GenerateRequest`;
    None: not in a header."""

    request_id: str
    address: str | None = None
    key: int | None = None
    user: str | None = None
    session: str | None = None
    claimed: str = ""
    priority: int | None = None
    ttft_slo_s: float | None = None

    @property
    def tenant(self) -> str:
        """See docs/router.md ("Queues")."""
        return self.claimed if self.key is None else f"key-{self.key}"

    def fields(self) -> dict[str, object]:
        return {"request_id": self.request_id, "address": self.address, "key": self.key, "user": self.user}


class _Headers(Protocol):
    def get(self, key: str, default: str) -> str: ...


# Tasks inherit it.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def request_id_of(headers: _Headers) -> str:
    """`X-Request-Id`, or a new id if that is missing or unfit for a response."""
    given = headers.get(REQUEST_ID, "")
    usable = 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable()
    return given if usable else os.urandom(16).hex()


def session_of(caller: Caller | None) -> str | None:
    return None if caller is None else caller.session or caller.user


def note_standing(caller: Caller, headers: _Headers) -> None:
    """Raises `RequestError`."""
    priority, within_ms = _number(headers, PRIORITY), _number(headers, TTFT_SLO_MS)
    if within_ms is not None and not 0.0 < within_ms <= MAX_WAITED_S:
        what = f"must be above 0 and at most {MAX_WAITED_S:g}, got {within_ms:g}"
        raise RequestError(f"the header {TTFT_SLO_MS} {what}", TTFT_SLO_MS)
    if priority is not None and not (priority.is_integer() and abs(priority) < MAX_PRIORITY):
        what = f"must be an integer above -{MAX_PRIORITY} and below {MAX_PRIORITY}, got {priority:g}"
        raise RequestError(f"the header {PRIORITY} {what}", PRIORITY)
    caller.claimed = next((found for name in TENANT if (found := headers.get(name, ""))), "")[:_MAX_ID_CHARS]
    caller.priority = None if priority is None else int(priority)
    caller.ttft_slo_s = None if within_ms is None else within_ms / 1000.0


def asked_standing(field: int | None) -> tuple[int, float | None]:
    """Priority and TTFT objective. `field`: `priority` in the body, which a header overrides."""
    caller = CALLER.get()
    if caller is None:
        return field or 0, None
    return (field or 0) if caller.priority is None else caller.priority, caller.ttft_slo_s


def _number(headers: _Headers, name: str) -> float | None:
    text = headers.get(name, "")
    if not text:
        return None
    value = math.nan
    if text.isascii() and "_" not in text:  # 1_0 is none
        with contextlib.suppress(ValueError):
            value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the header {name} must be a number, got {text[:_MAX_ID_CHARS]!r}", name)
    return value


def session_in(headers: _Headers) -> str | None:
    given = headers.get(SESSION_ID, "")
    return given if 0 < len(given) <= _MAX_TEXT_CHARS else None


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
    """`name=value ...` without None."""
    return " ".join(
        [
            f"{name}={value if type(value) in _NUMBERS else _log_value(value)}"
            for name, value in fields.items()
            if value is not None
        ]
    )


def _log_value(value: object) -> str:
    text = str(value)
    if _WORD.fullmatch(text):
        return text
    if len(text) > _MAX_TEXT_CHARS:
        text = f"{text[:_MAX_TEXT_CHARS]}..."
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)

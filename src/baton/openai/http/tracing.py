"""The trace of a request (W3C Trace Context), passed on with its legs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_MAX_PARENT, _MAX_STATE = 256, 512


class _Headers(Protocol):
    def getall(self, key: str, default: list[str]) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Trace:
    """A well-formed `traceparent` and its `tracestate`."""

    traceparent: str
    tracestate: str | None = None

    @property
    def id(self) -> str:
        return self.traceparent.split("-")[1]

    def headers(self) -> Mapping[str, str]:
        state = {} if self.tracestate is None else {TRACESTATE: self.tracestate}
        return {TRACEPARENT: self.traceparent, **state}


# Of the current task's request; inherited by tasks.
TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)


def trace_of(headers: _Headers) -> Trace | None:
    """The trace in request headers, or None. A `tracestate` that is too long or not printable ASCII is dropped."""
    parents = headers.getall(TRACEPARENT, [])
    match = _PARENT.fullmatch(parents[0]) if len(parents) == 1 and len(parents[0]) <= _MAX_PARENT else None
    if match is None or (match[1] == "00" and match[3] is not None):
        return None
    state = ",".join(part for part in headers.getall(TRACESTATE, []) if part.strip())
    usable = 0 < len(state) <= _MAX_STATE and state.isascii() and state.isprintable()
    return Trace(parents[0], state if usable else None)

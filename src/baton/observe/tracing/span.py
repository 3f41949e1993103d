"""A span, and the interface of exporters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, Protocol

Value = str | bool | int | float | tuple[str, ...]
SpanKind = Literal["server", "client", "internal"]
# Ids need no secrecy: the operating system's randomness would cost a system call each.
_IDS = random.Random()


def new_trace_id() -> int:
    """Never 0."""
    return _IDS.getrandbits(128) | 1


def new_span_id() -> int:
    """Never 0."""
    return _IDS.getrandbits(64) | 1


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """`at`: nanoseconds since 1970."""

    name: str
    at: int
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """`start`, `end`: nanoseconds since 1970. `process`: where it ran, for a timeline. `error`: why it failed; empty if
    it did not. `links`: span ids in the same trace."""

    name: str
    trace_id: int
    start: int
    parent_id: int | None = None
    kind: SpanKind = "internal"
    process: str = "router"
    request_id: str = ""
    end: int = 0
    error: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    span_id: int = field(default_factory=new_span_id)

    @property
    def traceparent(self) -> str:
        """The W3C header for its children, which are sampled too."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


class SpanSink(Protocol):
    """An exporter. Never raises and never waits."""

    def export(self, span: Span) -> None: ...
    def close(self) -> None: ...

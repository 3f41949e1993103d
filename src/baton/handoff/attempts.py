"""What the agent keeps per peer and per attempt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.handoff.channel import Connection
from baton.handoff.decode import DecodeHandoff
from baton.handoff.messages import AttemptKey, Hello
from baton.handoff.prefill import PrefillHandoff
from baton.transports.base import Peer

# Ended attempts are kept as tombstones; beyond this many the oldest go.
MAX_TOMBSTONES = 1 << 16


@dataclass(slots=True, eq=False)
class Link:
    """One peer engine: the session with it, what it said in HELLO, and the transport's end.

    `refusal` is `(reason, message)` when its HELLO came but no KV may be exchanged with it.
    """

    connection: Connection
    hello: Hello | None = None
    peer: Peer | None = None
    refusal: tuple[str, str] | None = None
    next_hello: float = 0.0

    @property
    def ready(self) -> bool:
        """True when attempts may use it."""
        return self.hello is not None and self.refusal is None


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """P's half of one attempt. `deadline` is the time (monotonic seconds) at which its ticket expires."""

    machine: PrefillHandoff
    deadline: float
    link: Link | None = None
    expired: bool = False
    counted: bool = False


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """D's half of one attempt. `peer` is P's transport end that REGISTER opened D's pages to: it is the one
    whose fence counts.
    """

    machine: DecodeHandoff
    deadline: float
    link: Link
    peer: Peer | None = None
    expired: bool = False


AttemptT = TypeVar("AttemptT", PrefillAttempt, DecodeAttempt)


@dataclass(slots=True)
class Book(Generic[AttemptT]):
    """Attempts of one side by key, live ones and tombstones, in order of creation."""

    entries: dict[AttemptKey, AttemptT] = field(default_factory=dict)

    def get(self, key: AttemptKey) -> AttemptT | None:
        """The attempt, live or ended."""
        return self.entries.get(key)

    def add(self, key: AttemptKey, attempt: AttemptT) -> AttemptT:
        """Keep a new attempt; makes room among the tombstones when there are too many."""
        if len(self.entries) >= MAX_TOMBSTONES:
            ended = [old for old, entry in self.entries.items() if entry.machine.closed]
            for old in ended[: MAX_TOMBSTONES // 8]:
                del self.entries[old]
        self.entries[key] = attempt
        return attempt

    def live(self) -> Iterator[AttemptT]:
        """Attempts that are not closed."""
        return (attempt for attempt in list(self.entries.values()) if not attempt.machine.closed)

    def forget(self, before: float) -> None:
        """Drop tombstones whose ticket expired before `before` (monotonic seconds)."""
        old = [key for key, entry in self.entries.items() if entry.machine.closed and entry.deadline < before]
        for key in old:
            del self.entries[key]

"""What the agent keeps per attempt, and its figures."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baton.handoff import events as ev
from baton.handoff.decode import DecodeHandoff, DecodePhase
from baton.handoff.events import CopyLedger
from baton.handoff.links import Link
from baton.handoff.messages import AttemptKey
from baton.handoff.prefill import PrefillHandoff, PrefillPhase
from baton.transports.base import Peer

# Ended attempts are kept as tombstones; beyond this many the oldest go.
MAX_TOMBSTONES = 1 << 16


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """P's half of one attempt. `deadline` is the time (monotonic seconds) at which its ticket expires."""

    machine: PrefillHandoff
    deadline: float
    link: Link | None = None
    expired: bool = False

    @property
    def peer(self) -> Peer | None:
        """D's transport end, once D has spoken."""
        return None if self.link is None else self.link.peer

    @property
    def closing(self) -> bool:
        """Failed, and not proven quiet."""
        return self.machine.phase is PrefillPhase.CLOSING


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

    @property
    def closing(self) -> bool:
        """Failed, and not proven quiet."""
        return self.machine.phase is DecodePhase.CLOSING


AttemptT = TypeVar("AttemptT", PrefillAttempt, DecodeAttempt)


class Book(Generic[AttemptT]):
    """Attempts of one side by key: live ones, and tombstones in the order in which they ended."""

    def __init__(self) -> None:
        self.live: dict[AttemptKey, AttemptT] = {}
        self.ended: dict[AttemptKey, AttemptT] = {}
        self._transfers: dict[bytes, set[AttemptKey]] = {}

    def get(self, key: AttemptKey) -> AttemptT | None:
        """The attempt, live or ended."""
        return self.live.get(key) or self.ended.get(key)

    def add(self, key: AttemptKey, attempt: AttemptT) -> AttemptT:
        """Keep a new attempt."""
        self.live[key] = attempt
        self._transfers.setdefault(key.transfer_id, set()).add(key)
        return attempt

    def same_transfer(self, key: AttemptKey) -> set[AttemptKey]:
        """Keys of all known attempts of the same transfer."""
        return self._transfers.get(key.transfer_id, set())

    def settle(self, key: AttemptKey) -> None:
        """Make an attempt that has closed a tombstone."""
        attempt = self.live.get(key)
        if attempt is not None and attempt.machine.closed:
            self.ended[key] = self.live.pop(key)
            if len(self.ended) > MAX_TOMBSTONES:
                self._drop(next(iter(self.ended)))

    def forget(self, before: float) -> None:
        """Drop tombstones whose ticket expired before `before` (monotonic seconds)."""
        for key in [key for key, attempt in self.ended.items() if attempt.deadline < before]:
            self._drop(key)

    def _drop(self, key: AttemptKey) -> None:
        del self.ended[key]
        keys = self._transfers[key.transfer_id]
        keys.discard(key)
        if not keys:
            del self._transfers[key.transfer_id]


@dataclass(slots=True)
class Figures:
    """Counts since the start. Any thread may read them."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> None:
        """One more."""
        with self._lock:
            self.counts[name] += 1

    def note(self, event: ev.HandoffEvent, copies: CopyLedger) -> None:
        """Book how an attempt ended. P's copies are in `copies`; D's committed ones come with the event."""
        with self._lock:
            match event:
                case ev.DecodeCommitted(_, _, num_bytes, num_runs):
                    self._committed(num_bytes, num_runs)
                case ev.PrefillReleased(_, "committed"):
                    self._committed(copies.num_bytes, copies.num_runs)
                case ev.DecodeFinished() | ev.PrefillReleased(_, "finished"):
                    self.counts["finished"] += 1
                case ev.DecodeFailed(_, reason, _) | ev.PrefillReleased(_, reason):
                    self.failures[reason] += 1
                case ev.DecodeReleased():
                    pass  # its failure was booked, or the engine gave up by itself

    def _committed(self, num_bytes: int, num_runs: int) -> None:
        self.counts["handoffs"] += 1
        self.counts["bytes"] += num_bytes
        self.counts["runs"] += num_runs

    def snapshot(self) -> dict[str, Any]:
        """`handoffs`, `finished`, `bytes`, `runs`, `runs_per_handoff`, `failures` by reason, `rejected`."""
        with self._lock:
            names = ("handoffs", "finished", "bytes", "runs", "rejected")
            figures: dict[str, Any] = {name: self.counts[name] for name in names}
            figures["failures"] = dict(self.failures)
        figures["runs_per_handoff"] = figures["runs"] / max(1, figures["handoffs"])
        return figures

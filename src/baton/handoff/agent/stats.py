"""Metrics of an agent."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.errors import reason_label
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.copies import CopyLedger
from baton.histogram import RUNS, SECONDS, Histogram

_BY_RANK = (
    *("bytes", "runs", "hidden_bytes", "retries", "repairs", "bad_pieces", "lost_leases", "rejected", "malformed"),
    *("frames", "refused", "evicted", "unknown", "sessions"),
)


@dataclass(frozen=True, slots=True)
class CopyStats:
    """Copies that this side issued. `post`: seconds to submit. `runs`: per copy. `bytes`: of successful ones, by
    group.
    """

    plan: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    post: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    transfer: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    runs: Histogram = field(default_factory=lambda: Histogram(RUNS))
    bytes: Counter[str] = field(default_factory=Counter)

    def over_ranks(self, others: Sequence[CopyStats]) -> CopyStats:
        all_ = (self, *others)
        plan, post, transfer, runs = (
            Histogram.sum_of([getattr(one, name) for one in all_]) for name in ("plan", "post", "transfer", "runs")
        )
        return CopyStats(plan, post, transfer, runs, sum((one.bytes for one in all_), Counter()))


@dataclass(slots=True)
class AgentStats:
    """Counters. `handoffs`: committed. `finished`: ended by the first token. `bytes` and `runs`: of committed handoffs
    (in pull counted by D). `hidden_bytes`: copied before the prefill's end (counted by P). `retries`: copies issued
    again. `repairs`: rounds. `failures`: by reason. `rejected` and `malformed`: of all received `frames`. `refused`:
    connections. `evicted`: sessions.

    Gauges: `outstanding` and `quarantined` attempts, `unknown` copies (cancelled, not ended), ready `sessions`.
    """

    handoffs: int = 0
    finished: int = 0
    bytes: int = 0
    runs: int = 0
    hidden_bytes: int = 0
    retries: int = 0
    repairs: int = 0
    bad_pieces: int = 0
    lost_leases: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    malformed: int = 0
    frames: int = 0
    refused: int = 0
    evicted: int = 0
    outstanding: int = 0
    quarantined: int = 0
    unknown: int = 0
    sessions: int = 0
    copies: CopyStats = field(default_factory=CopyStats)

    def over_ranks(self, others: Sequence[AgentStats]) -> AgentStats:
        """Sums over all ranks; handoffs and attempts are those of this first rank."""
        sums = {name: sum(getattr(s, name) for s in (self, *others)) for name in _BY_RANK}
        return replace(self, **sums, copies=self.copies.over_ranks([s.copies for s in others]))


class AgentCounters:
    """`snapshot` is thread-safe."""

    def __init__(self) -> None:
        self._stats = AgentStats()
        self._lock = threading.Lock()

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            setattr(self._stats, name, getattr(self._stats, name) + by)

    def note(self, event: ev.HandoffEvent, copies: CopyLedger) -> None:
        """`copies`: P's; D's committed ones are in the event."""
        with self._lock:
            match event:
                case ev.DecodeCommitted(_, _, num_bytes, num_runs):
                    self._committed(num_bytes, num_runs)
                case ev.PrefillReleased(_, "committed"):
                    self._committed(copies.num_bytes, copies.num_runs)
                    self._stats.hidden_bytes += copies.num_hidden
                case ev.DecodeFinished() | ev.PrefillReleased(_, "finished"):
                    self._stats.finished += 1
                case ev.DecodeFailed(_, reason, _) | ev.PrefillReleased(_, reason):
                    label, failures = reason_label(reason), self._stats.failures
                    failures[label] = failures.get(label, 0) + 1
                case ev.DecodeReleased() | ev.DecodeProgress() | ev.DecodeAdmitted():
                    pass  # the failure was counted, or the engine gave up

    def _committed(self, num_bytes: int, num_runs: int) -> None:
        self._stats.handoffs += 1
        self._stats.bytes += num_bytes
        self._stats.runs += num_runs

    def snapshot(self, copies: CopyStats, **now: Any) -> AgentStats:
        with self._lock:
            return replace(self._stats, failures=dict(self._stats.failures), copies=copies, **now)

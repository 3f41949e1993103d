"""The times of one request."""

from __future__ import annotations

import msgspec

from baton.wire import UNHURRIED_S, GenerateRequest, LegTimings


class RequestTimes:
    """Monotonic seconds of this engine. `num_bytes`, `num_runs` and `integrity`: of the committed handoff."""

    def __init__(self, wire: GenerateRequest) -> None:
        self.queued_at = 0.0  # its arrival
        self.started_at: float | None = None  # the first step here; None for a decode leg
        self.committed_at: float | None = None  # of the handoff; None after the first step
        self.runs_since: float | None = None  # first step, or commit of the handoff
        self._waited_s = wire.waited_s  # earlier, in other attempts
        self.step_s_before = 0.0  # of a leg that moves a prefix: the engine's seconds in steps before it came
        # Seconds from the first arrival until the first token is due.
        self._due_after_s = UNHURRIED_S if wire.ttft_slo_s is None else wire.ttft_slo_s
        # By the names of `LegTimings`; None if not requested, or after the first chunk.
        self._marks: dict[str, float] | None = {} if wire.timings else None
        self._chunks: list[tuple[float, int]] = []  # as in `LegTimings`
        self.num_bytes = self.num_runs = 0
        self.integrity = ""

    @property
    def queued_s(self) -> float | None:
        return None if self.started_at is None else self.started_at - self.queued_at

    @property
    def due_at(self) -> float:
        """When the first token is due, counted from the first arrival at an engine."""
        return self.queued_at - self._waited_s + self._due_after_s

    @property
    def wanted(self) -> bool:
        """The client wants `LegTimings` and has not got them."""
        return self._marks is not None

    def mark(self, name: str, now: float) -> None:
        """Record a time of `LegTimings`; the first one counts."""
        if self._marks is not None:
            self._marks.setdefault(name, now)

    def mark_chunk(self, num_tokens: int, now: float) -> None:
        self._chunks.append((now, num_tokens))

    def leg_timings(self, now: float) -> LegTimings | None:
        """For the first chunk; None if not `wanted`."""
        if self._marks is None:
            return None
        since = {name: at - self.queued_at for name, at in self._marks.items()}
        if self.started_at is not None:
            since |= {"started": self.started_at - self.queued_at, "sampled": now - self.queued_at}
        self._marks = None
        chunks = [(began - self.queued_at, count) for began, count in self._chunks]
        timings = LegTimings(num_bytes=self.num_bytes, num_runs=self.num_runs, integrity=self.integrity, chunks=chunks)
        return msgspec.structs.replace(timings, **since)

"""Settings of a handoff agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.errors import ConfigError
from baton.handoff.protocol.messages import MAX_LEASE_S, MAX_ROUNDS
from baton.handoff.session.keys import KeyRing
from baton.wire import Integrity

DEFAULT_MAX_RETRIES = 3
DEFAULT_HANDOFF_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Timers:
    """Durations in seconds (docs/protocol.md, "Liveness"). None of them frees memory.

    Raises `ConfigError`.
    """

    retry: float = 1.0
    retry_min: float = 0.05
    round_trips: float = 8.0
    check: float = 0.1
    renew: float = 1.0
    lease: float = 5.0
    handoff: float = DEFAULT_HANDOFF_TIMEOUT_S
    close: float = 5.0
    hang: float = 30.0
    idle: float = 300.0

    def __post_init__(self) -> None:
        if (
            min(self.retry_min, self.check, self.renew, self.handoff, self.close, self.hang, self.idle) <= 0
            or self.retry < self.retry_min
        ):
            raise ConfigError("timers", "durations must be positive, and retry at least retry_min")
        if not 3 * self.renew <= self.lease <= MAX_LEASE_S:
            raise ConfigError("timers.lease", f"must be at least three times renew and at most {MAX_LEASE_S} s")

    @property
    def ack(self) -> float:
        """How long an ACK, whose work delays D's first step on a shared host, waits. P must not repeat COMMIT."""
        return self.retry_min / 2

    def first_retry(self, round_trip: float | None) -> float:
        if round_trip is None:
            return self.retry
        return min(self.retry, max(self.retry_min, self.round_trips * round_trip))


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """`fingerprint`: the fields that must be equal on both engines; geometry and `integrity` are added. Without `keys`:
    see `TicketKeys`. `max_retries` bounds, per attempt, the retried copies and the repair rounds.

    Raises `ConfigError`.
    """

    engine_id: str
    incarnation: str
    bind: str = "tcp://127.0.0.1:*"
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    ticket_key: bytes = b""
    keys: KeyRing | None = None
    timers: Timers = field(default_factory=Timers)
    integrity: Integrity = "off"
    max_retries: int = DEFAULT_MAX_RETRIES

    def __post_init__(self) -> None:
        if not 0 <= self.max_retries <= MAX_ROUNDS:
            raise ConfigError("max_retries", f"must be in [0, {MAX_ROUNDS}]")


def own_bind(bind: str, rank: int) -> str:
    """Rank r binds rank 0's port plus r, or its path and `_r`; port `*` stays."""
    if rank and bind.startswith("ipc://"):
        return f"{bind}_{rank}"
    host, _, port = bind.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank and port.isdecimal() else bind

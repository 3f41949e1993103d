"""The clock of a process, which a simulator can replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time: no handoff uses the time of day."""

    def monotonic(self) -> float:
        """Seconds; never goes back. Other processes can compare it only with values that they read from here."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

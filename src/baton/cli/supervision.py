"""Keeps the processes of a deployment running: one that ends by itself is started again, after a pause that grows.

An engine's own state is gone with it; the router continues its requests elsewhere or tells their clients, and takes the
new process at the old address in when it answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

DEFAULT_MAX_RESTARTS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# Who has served for so long has a new chance: what ended it is no fault of its start.
_CALM_S = 300.0


class Processes(Protocol):
    """The children that a supervisor looks after, by name."""

    def ended(self) -> dict[str, str]:
        """Those that have ended, with the last line that each wrote."""
        ...

    def told(self, name: str) -> bool:
        """Whether it has ended because it was told to."""
        ...

    def restart(self, name: str, wait: bool = True) -> None:
        """Start a child anew at the address that it had; without `wait` it may not serve yet."""
        ...


@dataclass(slots=True)
class _Past:
    """Restarts of one child since it was last calm, when it was started last, and when it shall be again."""

    restarts: int = 0
    started: float = 0.0
    due: float | None = None


class Supervisor:
    """Looks at `processes` whenever `look` is called, and tells by `tell` what it saw and did.

    A child may be started `max_restarts` times in succession; then `failure` says what ended it last, and no more is
    done. One that was told to end is started at once, and not counted. `clock` gives seconds.
    """

    def __init__(
        self,
        processes: Processes,
        tell: Callable[[str], None],
        max_restarts: int = DEFAULT_MAX_RESTARTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._tell, self._max_restarts, self._clock = processes, tell, max_restarts, clock
        self._begun = clock()
        self._pasts: dict[str, _Past] = {}
        self.failure: str | None = None

    def look(self) -> None:
        """Start again what is due."""
        if self.failure is not None:
            return
        now = self._clock()
        for name, line in self._processes.ended().items():
            past = self._pasts.setdefault(name, _Past(started=self._begun))
            if past.due is None and self._processes.told(name):
                past.due = now
                self._tell(f"{name} has ended as it was told to")
            elif past.due is None:
                if now - past.started >= _CALM_S:
                    past.restarts = 0
                if past.restarts == self._max_restarts:
                    self.failure = f"{name} has ended {past.restarts + 1} times, the last time with: {line}"
                    return
                pause = min(_FIRST_PAUSE_S * 2**past.restarts, _LONGEST_PAUSE_S)
                past.restarts, past.due = past.restarts + 1, now + pause
                self._tell(f"{name} has ended: {line}; it is started again in {pause:g} s")
            elif now >= past.due:
                past.started, past.due = now, None
                self._processes.restart(name, wait=False)
                self._tell(f"{name} is started again")

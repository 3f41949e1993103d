"""Restarts processes of a deployment that end by themselves, after growing pauses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

DEFAULT_MAX_RESTARTS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# After this many seconds of service, a process regains all its restarts.
_CALM_S = 300.0


class Processes(Protocol):
    """Children have names, such as `decode-0`."""

    def ended(self) -> dict[str, str]:
        """Why each child ended."""
        ...

    def ended_cleanly(self, name: str) -> bool: ...

    def restart(self, name: str, wait: bool = True) -> None:
        """Start the child again at the same address. Without `wait` it may not serve yet."""
        ...


@dataclass(slots=True)
class _RestartState:
    """Since a child's last calm period."""

    restarts: int = 0
    started: float = 0.0
    due: float | None = None


class Supervisor:
    """`poll` checks `processes`, and reports through `on_progress`.

    After `max_restarts` restarts of a child in a row, `failure` is set to its last line, and `poll` does nothing more.
    A child that shut down cleanly after a signal is restarted at once, uncounted.
    """

    def __init__(
        self,
        processes: Processes,
        on_progress: Callable[[str], None],
        max_restarts: int = DEFAULT_MAX_RESTARTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._on_progress = processes, on_progress
        self._max_restarts, self._clock = max_restarts, clock
        self._begun = clock()
        self._states: dict[str, _RestartState] = {}
        self.failure: str | None = None

    def poll(self) -> None:
        if self.failure is not None:
            return
        now = self._clock()
        for name, line in self._processes.ended().items():
            state = self._states.setdefault(name, _RestartState(started=self._begun))
            if state.due is None and self._processes.ended_cleanly(name):
                state.due = now
                self._on_progress(f"{name} has ended after a signal")
            elif state.due is None:
                if now - state.started >= _CALM_S:
                    state.restarts = 0
                if state.restarts == self._max_restarts:
                    self.failure = f"{name} has ended {state.restarts + 1} times, the last time with: {line}"
                    return
                pause = min(_FIRST_PAUSE_S * 2**state.restarts, _LONGEST_PAUSE_S)
                state.restarts, state.due = state.restarts + 1, now + pause
                self._on_progress(f"{name} has ended: {line}; it is started again in {pause:g} s")
            elif now >= state.due:
                state.started, state.due = now, None
                self._processes.restart(name, wait=False)
                self._on_progress(f"{name} is started again")

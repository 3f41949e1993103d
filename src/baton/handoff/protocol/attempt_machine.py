"""The base of both state machines."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Generic, TypeVar

from baton.handoff.protocol import events as ev
from baton.handoff.protocol.copies import CopyLedger
from baton.handoff.protocol.event_names import name_of
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.transitions import HistoryEntry, Table, format_events
from baton.wire import Integrity, Mode

PhaseT = TypeVar("PhaseT", bound=Enum)
# Events and steps kept for error messages: while an attempt lives, and after its end.
HISTORY, LAST_HISTORY = 16, 4


class AttemptMachine(Generic[PhaseT]):
    """`max_retries` bounds both the retried copies and the repair rounds, counted by `round`. `reason`: why the attempt
    ended.
    """

    def __init__(
        self, key: AttemptKey, mode: Mode, max_retries: int, integrity: Integrity, table: Table[PhaseT], phase: PhaseT
    ) -> None:
        self.key = key
        self.mode = mode
        self.max_retries = max_retries
        self.integrity = integrity
        self.phase = phase
        self.reason = ""
        self.round = 0
        self.copies = CopyLedger(max_retries)
        self._events: deque[HistoryEntry] = deque(maxlen=HISTORY)
        self._table = table

    @property
    def history(self) -> list[str]:
        return format_events(self._events)

    def _enter(self, event: ev.MachineEvent) -> str:
        """The name of an input. Raises `UndefinedTransitionError`."""
        name = name_of(event)
        self._table.after(self.phase, name, self._events)
        if name != "tick" or not self._events or self._events[-1][0] != "tick":
            self._events.append((name, None))
        return name

    def _step(self, step: str) -> None:
        """Raises `UndefinedTransitionError`."""
        self.phase = self._table.after(self.phase, step, self._events)
        self._events.append((step, self.phase))

    def _trim_history(self) -> None:
        """Tombstones are many, so they keep fewer events."""
        self._events = deque(list(self._events)[-LAST_HISTORY:], maxlen=LAST_HISTORY)

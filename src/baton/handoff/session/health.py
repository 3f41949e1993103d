"""Peers whose handoffs repeatedly need repair."""

from __future__ import annotations

from baton.handoff.protocol.events import DecodeCommitted, DecodeFailed, HandoffEvent

# This many repaired handoffs in a row exclude a peer until its process is replaced.
UNHEALTHY_REPAIRS = 3
MAX_SUSPECTS = 1024


class Health:
    """Counts repaired handoffs in a row by peer. Not thread-safe."""

    def __init__(self) -> None:
        self._repaired: dict[tuple[str, int], int] = {}  # by process and rank

    def note(self, event: HandoffEvent, repaired: bool) -> None:
        failed = isinstance(event, DecodeFailed) and event.reason == "integrity_failed"
        if failed or (repaired and isinstance(event, DecodeCommitted)):
            source = event.key.ends[0]
            self._repaired[source] = self._repaired.pop(source, 0) + 1
            if len(self._repaired) > MAX_SUSPECTS:
                del self._repaired[next(iter(self._repaired))]
        elif isinstance(event, DecodeCommitted):
            self._repaired.pop(event.key.ends[0], None)

    def why_not(self, source: tuple[str, int]) -> str:
        """Why no further handoff is accepted from a process and rank; empty if any is."""
        count = self._repaired.get(source, 0)
        return f"{count} handoffs in a row needed repair" if count >= UNHEALTHY_REPAIRS else ""

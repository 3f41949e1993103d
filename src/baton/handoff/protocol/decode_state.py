"""Phases of D's machine, grouped."""

from __future__ import annotations

from baton.handoff.protocol.attempt_machine import AttemptMachine
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.phases import DecodePhase as Phase
from baton.handoff.protocol.transitions import DECODE
from baton.wire import Integrity, Mode

UNREACHED = (Phase.WAITING, Phase.PLACED)
UNPLACED = (Phase.WAITING, Phase.ANNOUNCED, Phase.ADMITTED)


class DecodeState(AttemptMachine[Phase]):
    def __init__(self, key: AttemptKey, mode: Mode, max_retries: int, integrity: Integrity) -> None:
        super().__init__(key, mode, max_retries, integrity, DECODE, Phase.WAITING)

    @property
    def closing(self) -> bool:
        return self.phase in (Phase.WITHDRAWN, Phase.CLOSING, Phase.STOPPING)

    @property
    def closed(self) -> bool:
        """Only late messages are still answered."""
        return self.phase in (Phase.CANCEL_DUE, Phase.FAILED, Phase.DONE)

    @property
    def reached(self) -> bool:
        return self.phase not in UNREACHED

    @property
    def is_admitted(self) -> bool:
        return self.phase is Phase.ADMITTED

    @property
    def takes_pages(self) -> bool:
        """The engine may give pages; an ended attempt ignores them."""
        return self.phase in UNPLACED or self.phase is Phase.WITHDRAWN or self.closed

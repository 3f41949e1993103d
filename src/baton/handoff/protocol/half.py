"""What both halves of an attempt have."""

from __future__ import annotations

from baton.handoff.protocol.copies import CopyLedger
from baton.handoff.protocol.messages import AttemptKey
from baton.wire import Integrity, Mode


class Half:
    """One side of an attempt. At most `max_retries` copies are issued again after a failure, and as many rounds of
    repair begun; `round` counts these. `reason` is why it ended.
    """

    def __init__(self, key: AttemptKey, mode: Mode, max_retries: int, integrity: Integrity) -> None:
        self.key = key
        self.mode = mode
        self.max_retries = max_retries
        self.integrity = integrity
        self.reason = ""
        self.round = 0
        self.copies = CopyLedger(max_retries)

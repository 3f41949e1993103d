"""Base class of both state machines of an attempt."""

from __future__ import annotations

from baton.handoff.protocol.copies import CopyLedger
from baton.handoff.protocol.messages import AttemptKey
from baton.wire import Integrity, Mode


class AttemptMachine:
    """`max_retries` bounds both the failed copies that are issued again and the rounds of repair, which `round` counts.
    `reason`: why the attempt ended."""

    def __init__(self, key: AttemptKey, mode: Mode, max_retries: int, integrity: Integrity) -> None:
        self.key = key
        self.mode = mode
        self.max_retries = max_retries
        self.integrity = integrity
        self.reason = ""
        self.round = 0
        self.copies = CopyLedger(max_retries)

"""Where each half of an attempt is."""

from __future__ import annotations

from enum import Enum


class PrefillPhase(Enum):
    """Where P's half of an attempt is."""

    OPEN = "open"  # prefilling, or waiting for REGISTER
    OFFERED = "offered"  # COMMIT, READY, CONFIRM or FINISHED sent and repeated until answered
    CLOSING = "closing"  # failed; waiting until the pages are quiet
    CLOSED = "closed"  # nothing left to do


class DecodePhase(Enum):
    """Where D's half of an attempt is."""

    WAITING = "waiting"  # no session with P yet: nothing was sent
    ANNOUNCED = "announced"  # ANNOUNCE sent, no destination pages yet
    REGISTERED = "registered"  # REGISTER or REPAIR sent
    READING = "reading"  # pull: own reads outstanding
    CHECKING = "checking"  # everything is here; digests are being compared
    READ = "read"  # pull: READ_DONE sent
    CLOSING = "closing"  # failed; waiting until the pages are quiet
    FAILED = "failed"  # failed, and released
    DONE = "done"  # committed or finished

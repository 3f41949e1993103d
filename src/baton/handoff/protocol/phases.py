"""Phases of the two state machines of an attempt."""

from __future__ import annotations

from enum import Enum


class PrefillPhase(Enum):
    """Of P's machine."""

    OPEN = "open"  # prefilling, or waiting for REGISTER
    OFFERED = "offered"  # COMMIT, READY, CONFIRM or FINISHED sent, and repeated until answered
    CLOSING = "closing"  # failed; waiting until the pages are quiet
    CLOSED = "closed"  # nothing left to do


class DecodePhase(Enum):
    """Of D's machine."""

    WAITING = "waiting"  # no session with P yet, nothing sent
    ANNOUNCED = "announced"  # ANNOUNCE sent, no destination pages yet
    REGISTERED = "registered"  # REGISTER or REPAIR sent
    READING = "reading"  # pull: own reads outstanding
    CHECKING = "checking"  # all data arrived; digests are being compared
    READ = "read"  # pull: READ_DONE sent
    CLOSING = "closing"  # failed; waiting until the pages are quiet
    FAILED = "failed"  # failed, and released
    DONE = "done"  # committed or finished

"""Phases of the two state machines of an attempt; `transitions.py` has their order."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Hashed by identity: tables are looked up for each event."""

    __hash__ = object.__hash__


class PrefillPhase(Phase):
    OPEN = "open"  # prefilling, or waiting for REGISTER, or copying
    ENDING = "ending"  # the first token ended the request; own copies are outstanding
    ENDED = "ended"  # the first token ended the request, and the pages are free; D does not know yet
    COMMITTED = "committed"  # push: COMMIT sent
    READY = "ready"  # pull: READY sent; D may be reading
    CONFIRMED = "confirmed"  # pull: CONFIRM sent
    FINISHED = "finished"  # FINISHED sent; as the three above, repeated until answered
    STOPPING = "stopping"  # failed; own copies outstanding
    AWAITING_READER = "awaiting reader"  # pull: failed after READY; D may be reading
    AWAITING_ACK = "awaiting ACK"  # pull: failed after CONFIRM; ACK too proves that D reads no more
    CLOSED = "closed"  # nothing left to do


class EnginePhase(Phase):
    """What P's engine has done with an attempt."""

    ABSENT = "absent"  # D's claim began the attempt; the engine has not opened its leg
    OPENED = "opened"  # the engine has opened its leg
    ADMITTED = "admitted"  # the engine has pages for the whole prompt
    RELEASED = "released"  # the engine knows that its pages are free
    RELEASE_DUE = "release due"  # ended before the engine opened its leg; notified when it does


class PeerPhase(Phase):
    """What P has received from D."""

    SILENT = "silent"  # nothing: D waits for no answer
    HEARD = "heard"  # a message that is no claim
    ANNOUNCED = "announced"  # ANNOUNCE
    REGISTERED = "registered"  # REGISTER


class DecodePhase(Phase):
    WAITING = "waiting"  # no session with P yet and no destination pages; nothing sent
    PLACED = "placed"  # no session with P yet, but destination pages; nothing sent
    ANNOUNCED = "announced"  # ANNOUNCE sent, no destination pages
    ADMITTED = "admitted"  # P can finish the prefill; still no destination pages
    REGISTERED = "registered"  # REGISTER sent; in push, P may write the pages
    REPAIRING = "repairing"  # push: REPAIR sent; P may write the pages
    READING = "reading"  # pull: own reads outstanding
    CHECKING = "checking"  # all data arrived; digests are being compared
    READ = "read"  # pull: READ_DONE sent
    WITHDRAWN = "withdrawn"  # failed before REGISTER; CANCEL is repeated, since P may hold pages for D
    CLOSING = "closing"  # push: failed; CANCEL is repeated, since P may write the pages
    STOPPING = "stopping"  # pull: failed; own reads are outstanding
    CANCEL_DUE = "cancel due"  # failed and released before P was reached; CANCEL follows when it is
    FAILED = "failed"  # failed, and released
    DONE = "done"  # committed or finished

"""Vocabulary of the handoff state machines: events in, actions out, and events for the engine.

Machines know no clock, socket or thread: time reaches them as `Tick` and `Deadline`, copies as `CopyEnded`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.messages import AttemptKey, AttemptMessage, Seeds

# ---------------------------------------------------------------- events into a machine


@dataclass(frozen=True, slots=True)
class Opened:
    """P: the engine took the request."""


@dataclass(frozen=True, slots=True)
class Declared:
    """P: per group, tokens `[0, final)` will not change any more; `pages` is the block table so far."""

    prompt_len: int
    pages: dict[str, list[int]]
    final: dict[str, int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """P: the first token is sampled and the drafter has run, so every group is final up to the prompt's end.

    `finished`: this token ended the request, and there is nothing to decode.
    """

    seeds: Seeds
    finished: bool


@dataclass(frozen=True, slots=True)
class PeerReady:
    """D: the session with P is open, messages can be sent."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of this attempt came from the peer."""

    message: AttemptMessage


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """An operation ended: it touches no memory any more. `ok` says whether all its bytes are visible."""

    copy_id: int
    ok: bool
    message: str = ""
    num_bytes: int = 0
    num_runs: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """This side gives up."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The ticket's time is over."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time to repeat what the peer has not answered."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer cannot be talked to. `fenced`: it is proven to touch no memory of ours any more, by its death
    or by its own word.
    """

    reason: str
    message: str
    fenced: bool


MachineEvent = Opened | Declared | Sampled | PeerReady | Received | CopyEnded | Abort | Deadline | Tick | PeerLost

# ---------------------------------------------------------------- actions out of a machine


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the peer of this attempt."""

    message: AttemptMessage


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Copy tokens `[start, stop)` of a group from P's pages to D's; answer with one `CopyEnded(copy_id)`."""

    copy_id: int
    group: str
    start: int
    stop: int
    source_pages: list[int]
    dest_pages: list[int]


@dataclass(frozen=True, slots=True)
class CancelCopies:
    """Ask the transport to stop these; each still ends in its `CopyEnded`."""

    copy_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the engine."""

    event: HandoffEvent


Action = Send | StartCopy | CancelCopies | Notify

# ---------------------------------------------------------------- events for the engine


@dataclass(frozen=True, slots=True)
class PrefillReleased:
    """P's pages of this attempt may be freed. `outcome`: `committed`, `finished`, or the reason of a failure.

    May come before the prefill ends (the other side gave up); the engine then drops the request.
    """

    key: AttemptKey
    outcome: str


@dataclass(frozen=True, slots=True)
class DecodeCommitted:
    """Every wanted interval of every group is in place. The pages are the engine's alone from now on."""

    key: AttemptKey
    seeds: Seeds
    num_bytes: int
    num_runs: int


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The first token ended the request on P. The pages are quiet and may be freed."""

    key: AttemptKey
    seeds: Seeds


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The request must end in an error. Its pages may still be written: they are NOT free yet."""

    key: AttemptKey
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DecodeReleased:
    """After a failure or abort: D's pages are quiet and may be freed."""

    key: AttemptKey


HandoffEvent = PrefillReleased | DecodeCommitted | DecodeFinished | DecodeFailed | DecodeReleased


@dataclass(slots=True)
class CopyLedger:
    """Operations of one attempt: ids handed out, those outstanding, and what was moved."""

    next_id: int = 0
    outstanding: set[int] = field(default_factory=set)
    num_bytes: int = 0
    num_runs: int = 0

    def start(self) -> int:
        """A new outstanding operation's id."""
        copy_id = self.next_id
        self.next_id += 1
        self.outstanding.add(copy_id)
        return copy_id

    def end(self, event: CopyEnded) -> bool:
        """Book an end; False when it was booked before."""
        if event.copy_id not in self.outstanding:
            return False
        self.outstanding.discard(event.copy_id)
        self.num_bytes += event.num_bytes
        self.num_runs += event.num_runs
        return True

    def cancel(self) -> list[Action]:
        """Actions that stop what is outstanding."""
        return [CancelCopies(tuple(sorted(self.outstanding)))] if self.outstanding else []

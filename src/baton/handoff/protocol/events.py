"""Vocabulary of the handoff state machines: events in, actions out, and events for the engine.

Machines know no clock, socket or thread: time reaches them as `Tick` and `Deadline`, copies as `CopyEnded`.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.handoff.protocol.messages import AttemptKey, AttemptMessage, Digests, PieceDigest, Seeds
from baton.kv.interval import ALL_LAYERS, Interval


@dataclass(frozen=True, slots=True)
class BadPiece:
    """Tokens of a group whose bytes do not match their digests in `cells`: (the model's id of a layer, plane)."""

    group: str
    tokens: Interval
    cells: tuple[tuple[int, str], ...]


# ---------------------------------------------------------------- events into a machine


@dataclass(frozen=True, slots=True)
class Opened:
    """P: the engine took the request."""


@dataclass(frozen=True, slots=True)
class PagesGiven:
    """P: the engine has given the request pages for its whole prompt."""


@dataclass(frozen=True, slots=True)
class Declared:
    """P: per group, tokens `[0, final)` will not change any more; `pages` is the block table so far."""

    prompt_len: int
    pages: dict[str, list[int]]
    final: dict[str, int]


@dataclass(frozen=True, slots=True)
class LayersWritten:
    """P: a forward is under way that makes more final, and its first layers are written: per group, tokens `[0, final)`
    of the layers below `layers` (the model's ids) will not change any more, unless `LayersWithdrawn` comes. With the
    end of the forward comes `Declared`.
    """

    prompt_len: int
    pages: dict[str, list[int]]
    final: dict[str, int]
    layers: int


@dataclass(frozen=True, slots=True)
class LayersWithdrawn:
    """P: the forward of `LayersWritten` has failed: another may write its layers again, and otherwise."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """P: the first token is sampled and the drafter has run with it: per group, tokens `[0, final)` are final now.

    Groups that are not named are as they were declared. `finished`: this token ended the request, and there is
    nothing to decode.
    """

    seeds: Seeds
    finished: bool
    final: dict[str, int]


@dataclass(frozen=True, slots=True)
class PeerReady:
    """D: the session with P is open, messages can be sent. `groups`: those of which it moves bytes; None: all."""

    groups: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """D: the engine has destination pages for an attempt that was announced; per group the interval wanted."""

    wanted: dict[str, Interval]
    pages: dict[str, list[int]]


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
class DigestsComputed:
    """P: the answer to `ComputeDigests`, in token order."""

    group: str
    pieces: list[PieceDigest]


@dataclass(frozen=True, slots=True)
class DigestsChecked:
    """D: the answer to `CheckDigests`: the pieces that do not match."""

    check_id: int
    bad: tuple[BadPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """This side cannot go on with the attempt; its engine did not ask for that, and is told."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Abort:
    """This side's engine gives up."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time that the attempt had is over; `message` says which."""

    message: str = "the handoff did not end in time"


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


MachineEvent = (
    Opened
    | PagesGiven
    | Declared
    | LayersWritten
    | LayersWithdrawn
    | Sampled
    | PeerReady
    | Placed
    | Received
    | CopyEnded
    | DigestsComputed
    | DigestsChecked
    | Fault
    | Abort
    | Deadline
    | Tick
    | PeerLost
)

# ---------------------------------------------------------------- actions out of a machine


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the peer of this attempt."""

    message: AttemptMessage


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Copy tokens of a group in some layers (the model's ids) from P's pages to D's; answer with one
    `CopyEnded(copy_id)`.
    """

    copy_id: int
    group: str
    tokens: Interval
    source_pages: list[int]
    dest_pages: list[int]
    layers: Interval = ALL_LAYERS


@dataclass(frozen=True, slots=True)
class CancelCopies:
    """Ask the transport to stop these; each still ends in its `CopyEnded`."""

    copy_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeDigests:
    """P: digest these intervals of a group; answer with one `DigestsComputed`."""

    group: str
    intervals: tuple[Interval, ...]
    pages: list[int]


@dataclass(frozen=True, slots=True)
class CheckDigests:
    """D: compare the destination pages with P's digests; answer with one `DigestsChecked(check_id)`."""

    check_id: int
    digests: Digests
    pages: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Count:
    """Book a figure: `retries` (copies issued again), `repairs` (rounds), `bad_pieces`."""

    name: str
    by: int = 1


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the engine."""

    event: HandoffEvent


Action = Send | StartCopy | CancelCopies | ComputeDigests | CheckDigests | Count | Notify

# ---------------------------------------------------------------- events for the engine


@dataclass(frozen=True, slots=True)
class PrefillReleased:
    """P's pages of this attempt may be freed. `outcome`: `committed`, `finished`, or the reason of a failure.

    May come before the prefill ends (the other side gave up); the engine then drops the request.
    """

    key: AttemptKey
    outcome: str


@dataclass(frozen=True, slots=True)
class DecodeAdmitted:
    """P can finish the prefill of an announced attempt, so that it is worth giving it destination pages.

    `groups`: those that P brings, None for all. What is wanted may name no other.
    """

    key: AttemptKey
    groups: frozenset[str] | None = None


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
    """No KV will come of this attempt. Its pages may still be written: they are NOT free yet.

    `recoverable`: nothing but the KV is lost, so that computing it elsewhere answers the request.
    """

    key: AttemptKey
    reason: str
    message: str
    recoverable: bool = False


@dataclass(frozen=True, slots=True)
class DecodeProgress:
    """Per group, tokens from the start of the wanted interval up to `proven` hold their final bytes, checked
    against P's digests. Never goes back; nothing of it is lost by a later failure.
    """

    key: AttemptKey
    proven: dict[str, int]


@dataclass(frozen=True, slots=True)
class DecodeReleased:
    """After a failure or abort: D's pages are quiet and may be freed."""

    key: AttemptKey


HandoffEvent = (
    PrefillReleased | DecodeAdmitted | DecodeCommitted | DecodeFinished | DecodeFailed | DecodeProgress | DecodeReleased
)

# Failures after which computing the KV anew would not help: the request is over, or was never allowed. An engine's own
# abort is no failure that it would be told of; P's may be of P's leg alone.
FINAL_REASONS = frozenset({"incompatible_peer", "not_final", "register_refused", "superseded"})

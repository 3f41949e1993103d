"""Events and actions of the handoff state machines, and events for the engine."""

from __future__ import annotations

from dataclasses import dataclass

from baton.handoff.protocol.messages import AttemptKey, AttemptMessage, Digests, PieceDigest, Seeds
from baton.kv.interval import ALL_LAYERS, Interval


@dataclass(frozen=True, slots=True)
class BadPiece:
    """Tokens of a group whose bytes do not match their digests in `cells`: (layer id of the model, plane)."""

    group: str
    tokens: Interval
    cells: tuple[tuple[int, str], ...]


# ---------------------------------------------------------------- events into a machine


@dataclass(frozen=True, slots=True)
class Opened:
    """P: the engine took the request."""


@dataclass(frozen=True, slots=True)
class PagesGiven:
    """P: the engine has allocated pages for the whole prompt."""


@dataclass(frozen=True, slots=True)
class Declared:
    """P: per group, tokens `[0, final)` will not change; `pages` is the block table so far."""

    prompt_len: int
    pages: dict[str, list[int]]
    final: dict[str, int]


@dataclass(frozen=True, slots=True)
class LayersWritten:
    """P: a running forward has written tokens `[0, final)` of the layers below `layers` (ids of the model): final
    unless `LayersWithdrawn` follows."""

    prompt_len: int
    pages: dict[str, list[int]]
    final: dict[str, int]
    layers: int


@dataclass(frozen=True, slots=True)
class LayersWithdrawn:
    """P: the forward failed; another may write other values."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """P: the first token is sampled and the drafter has run with it. Groups not named in `final` stay as declared.
    `finished`: this token ended the request.
    """

    seeds: Seeds
    finished: bool
    final: dict[str, int]


@dataclass(frozen=True, slots=True)
class PeerReady:
    """D: the session with P is open. `groups`: those whose bytes it moves; None: all."""

    groups: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """D: the engine has destination pages for an announced attempt."""

    wanted: dict[str, Interval]
    pages: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Received:
    message: AttemptMessage


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The copy no longer touches memory. `ok`: all its bytes are visible."""

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
    """D: the answer to `CheckDigests`."""

    check_id: int
    bad: tuple[BadPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """This side cannot continue; its engine is notified."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Abort:
    """This side's engine gives up, and is not notified."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time limit of the handoff, or the life of its ticket, is over."""

    message: str = "the handoff did not end in time"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time to repeat unanswered messages."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer cannot be reached. `fenced`: its death, or its own message, proves that it no longer touches our
    memory.
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
    """Send a message to the peer; the agent drops it without a session, and `Tick` repeats it."""

    message: AttemptMessage


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Copy from P's to D's pages. Answered by one `CopyEnded`."""

    copy_id: int
    group: str
    tokens: Interval
    source_pages: list[int]
    dest_pages: list[int]
    layers: Interval = ALL_LAYERS


@dataclass(frozen=True, slots=True)
class CancelCopies:
    """Each copy still ends with its `CopyEnded`."""

    copy_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeDigests:
    """P: digest these intervals. Answered by one `DigestsComputed`."""

    group: str
    intervals: tuple[Interval, ...]
    pages: list[int]


@dataclass(frozen=True, slots=True)
class CheckDigests:
    """D: compare the destination pages with P's digests. Answered by one `DigestsChecked`."""

    check_id: int
    digests: Digests
    pages: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter: `retries` (copies issued again), `repairs` (rounds), `bad_pieces`."""

    name: str
    by: int = 1


@dataclass(frozen=True, slots=True)
class Notify:
    event: HandoffEvent


Action = Send | StartCopy | CancelCopies | ComputeDigests | CheckDigests | Count | Notify

# ---------------------------------------------------------------- events for the engine


@dataclass(frozen=True, slots=True)
class PrefillReleased:
    """P's pages of this attempt may be freed. `outcome`: `committed`, `finished`, or the reason of a failure.

    May come before the prefill ends, if D gave up; the engine then drops the request.
    """

    key: AttemptKey
    outcome: str


@dataclass(frozen=True, slots=True)
class DecodeAdmitted:
    """P can finish the prefill, so D should allocate destination pages. `groups`: those that P sends, None for all."""

    key: AttemptKey
    groups: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class DecodeCommitted:
    """Every wanted interval of every group is in place; only the engine uses the pages. `copied`: when the first and
    last copy ended, in monotonic seconds.
    """

    key: AttemptKey
    seeds: Seeds
    num_bytes: int
    num_runs: int
    copied: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The first token ended the request on P. The pages may be freed."""

    key: AttemptKey
    seeds: Seeds


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """This attempt will deliver no KV. Its pages may still be written: they are NOT free yet.

    `recoverable`: only the KV is lost; recomputing it can still answer the request.
    """

    key: AttemptKey
    reason: str
    message: str
    recoverable: bool = False


@dataclass(frozen=True, slots=True)
class DecodeProgress:
    """Per group, tokens from the start of the wanted interval up to `proven` match P's digests. Never decreases, and
    stays valid after a failure.
    """

    key: AttemptKey
    proven: dict[str, int]


@dataclass(frozen=True, slots=True)
class DecodeReleased:
    """D's pages may be freed, after a failure or abort."""

    key: AttemptKey


HandoffEvent = (
    PrefillReleased | DecodeAdmitted | DecodeCommitted | DecodeFinished | DecodeFailed | DecodeProgress | DecodeReleased
)

# Failures after which recomputing would not help. Not P's `aborted`: it may concern only P's leg.
FINAL_REASONS = frozenset({"incompatible_peer", "not_final", "register_refused", "superseded"})

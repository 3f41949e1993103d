"""Control messages between a prefill engine (P) and a decode engine (D). `frames.py` encodes them.

KV is addressed by token interval `[start, stop)` and block table (page of token t at index t // page_size).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.errors import ProtocolError
from baton.handoff.plan.planner import Instance
from baton.handoff.plan.topology import MAX_GROUPS, MAX_RANKS
from baton.kv.interval import MAX_TOKENS, Interval, Position
from baton.wire import TicketText, TokenLogprobs

MAX_PAGES = 1 << 20
MAX_DRAFTS = 256
MAX_DRAFTER_STATES = 1 << 20
# A digest covers at most this many tokens, and never crosses a multiple of it.
PIECE_TOKENS = 64
MAX_PIECES = MAX_TOKENS // PIECE_TOKENS
MAX_HASHES = 2048  # layers times planes
DIGEST_BYTES = 8
MAX_ROUNDS = 16
MAX_REPAIRS = 256
MAX_LEASE_S = 600.0
CHALLENGE_BYTES = 16

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]
# Printable ASCII, for logs and metrics.
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[ -~]*\Z")]
Reason = Annotated[str, Meta(max_length=64, pattern=r"^[ -~]*\Z")]
Text = Annotated[str, Meta(max_length=2048)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
PageIds = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=MAX_PAGES)]
PageTables = Annotated[dict[Name, PageIds], Meta(max_length=MAX_GROUPS)]
# The group whose table a group shares; on the wire only (`frames.py`).
SameTables = Annotated[dict[Name, Name], Meta(max_length=MAX_GROUPS)]
Intervals = Annotated[dict[Name, Interval], Meta(max_length=MAX_GROUPS)]
Age = Annotated[float, Meta(ge=0, le=86400)]
Round = Annotated[int, Meta(ge=0, le=MAX_ROUNDS)]
BadIntervals = Annotated[list[Interval], Meta(max_length=MAX_REPAIRS)]
SeedsDigest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Pair = tuple[int, int]  # (source rank, destination rank)


class AttemptKey(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one attempt to hand over one request: nothing else is matched.

    docs/protocol.md ("Terms") explains its parts. Pair (0, 0) has the key of the whole.
    """

    transfer_id: TransferId
    attempt: Annotated[int, Meta(ge=0, lt=1 << 31)]
    prefill_incarnation: Name
    decode_incarnation: Name
    source_rank: Rank = 0
    dest_rank: Rank = 0

    @property
    def pair(self) -> Pair:
        return self.source_rank, self.dest_rank

    @property
    def ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """(incarnation, rank) of P and of D."""
        return (self.prefill_incarnation, self.source_rank), (self.decode_incarnation, self.dest_rank)

    def of_pair(self, pair: Pair) -> AttemptKey:
        return msgspec.structs.replace(self, source_rank=pair[0], dest_rank=pair[1])

    def __str__(self) -> str:
        ranks = f" (ranks {self.source_rank} to {self.dest_rank})" if any(self.pair) else ""
        return f"{self.transfer_id.hex()}/{self.attempt}{ranks}"


class Seeds(msgspec.Struct, frozen=True):
    """What D needs to start with a verification instead of recomputing the last prompt token.

    After n prompt tokens, `first_token` is at position n, `draft_token_ids` from n+1 on. `drafter_states`: for a
    drafter of K chained modules, the little-endian float32 rows [K-1, E] that later modules take from earlier ones at
    their first entries after the prompt; else empty.
    """

    first_token: Token
    first_logprobs: TokenLogprobs | None = None
    draft_token_ids: Annotated[list[Token], Meta(max_length=MAX_DRAFTS)] = []
    drafter_states: Annotated[bytes, Meta(max_length=MAX_DRAFTER_STATES)] = b""


# The seeds of a rank that does not sample. No vocabulary contains this token.
NO_SEEDS = Seeds(first_token=(1 << 31) - 1)


class PieceDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digests of one piece of a group: `DIGEST_BYTES` per layer and plane, layers by id, planes in the geometry's
    order.
    """

    tokens: Interval
    hashes: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES * MAX_HASHES)]


# Pieces by group, in token order.
Digests = Annotated[dict[Name, Annotated[list[PieceDigest], Meta(max_length=MAX_PIECES)]], Meta(max_length=MAX_GROUPS)]


class ControlMessage(msgspec.Struct, frozen=True, tag_field="kind"):
    """`kind` names the message on the wire."""


class Hello(ControlMessage, frozen=True, tag="HELLO"):
    """Opens a session in four messages (docs/protocol.md).

    `challenge`: random, for this connection. `proof`: empty in D's first (`handshake.py`).
    """

    engine_id: Name
    incarnation: Name
    fingerprint: Annotated[dict[Name, Text], Meta(max_length=256)]
    instance: Instance
    challenge: Annotated[bytes, Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]
    proof: Annotated[bytes, Meta(max_length=32)] = b""
    descriptor: Annotated[bytes, Meta(max_length=1 << 16)] | None = None


class Bye(ControlMessage, frozen=True, tag="BYE"):
    """Ends a session. `quiet`: the sender's copies have all ended, and it will start no other."""

    reason: Reason
    quiet: bool = False


class Renew(ControlMessage, frozen=True, tag="RENEW"):
    """The sender counts as alive for `lease` seconds after this arrives.

    The receiver returns `nonce` with `echo` set. `stalled`: its engine hangs.
    """

    lease: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]
    nonce: Number
    echo: bool = False
    stalled: bool = False


class AttemptMessage(ControlMessage, frozen=True):
    key: AttemptKey


class Announce(AttemptMessage, frozen=True, tag="ANNOUNCE"):
    """D to P: D has this leg but no pages for it yet."""

    ticket: TicketText


class Admitted(AttemptMessage, frozen=True, tag="ADMITTED"):
    """P to D: P has pages for the whole prompt."""


class Register(AttemptMessage, frozen=True, tag="REGISTER"):
    """D to P: the wanted interval per group and, for push, D's block tables."""

    ticket: TicketText
    wanted: Intervals
    pages: PageTables
    same: SameTables = {}


class Ready(AttemptMessage, frozen=True, tag="READY"):
    """P to D, pull: P's block tables, and per group the end of the final interval `[0, final)`. `digests` cover what D
    wants; empty with integrity off.
    """

    final: Annotated[dict[Name, Position], Meta(max_length=MAX_GROUPS)]
    pages: PageTables
    digests: Digests = {}
    same: SameTables = {}


class ReadDone(AttemptMessage, frozen=True, tag="READ_DONE"):
    """D to P, pull: all reads of this attempt are done."""


class Confirm(AttemptMessage, frozen=True, tag="CONFIRM"):
    """P to D, pull: the pages belonged to this attempt until READ_DONE arrived."""

    seeds: Seeds
    seeds_digest: SeedsDigest = b""


class Progress(AttemptMessage, frozen=True, tag="PROGRESS"):
    """P to D, push: the pieces of `digests` are copied and visible, so D can check them during the prefill.

    Never repeated: COMMIT has all digests.
    """

    digests: Digests


class Commit(AttemptMessage, frozen=True, tag="COMMIT"):
    """P to D, push: every copy is done and visible. `final` as in READY.

    `round`: REPAIRs that P has carried out. `copied`: how many seconds before this message the first and last copy
    ended.
    """

    final: Annotated[dict[Name, Position], Meta(max_length=MAX_GROUPS)]
    seeds: Seeds
    num_bytes: Number = 0
    num_runs: Number = 0
    round: Round = 0
    digests: Digests = {}
    seeds_digest: SeedsDigest = b""
    copied: tuple[Age, Age] | None = None


class Repair(AttemptMessage, frozen=True, tag="REPAIR"):
    """D to P, push: these tokens, in order, did not match their digests. If `bad` is empty, the seeds did not."""

    round: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)]
    bad: Annotated[dict[Name, BadIntervals], Meta(max_length=MAX_GROUPS)]


class Finished(AttemptMessage, frozen=True, tag="FINISHED"):
    """P to D: the first token ended the request. No copy is outstanding."""

    seeds: Seeds


class Ack(AttemptMessage, frozen=True, tag="ACK"):
    """D to P: committed or finished. P may free its pages."""


class Nack(AttemptMessage, frozen=True, tag="NACK"):
    """P to D: the ANNOUNCE or REGISTER is refused. Proves nothing about memory: D still sends CANCEL."""

    reason: Reason
    message: Text = ""


class Cancel(AttemptMessage, frozen=True, tag="CANCEL"):
    """Either side: the attempt is over. Issue no more copies, and reply when yours have ended."""

    reason: Reason
    message: Text = ""


class Cancelled(AttemptMessage, frozen=True, tag="CANCELLED"):
    """Either side: no copy of this attempt issued by the sender is outstanding, and none will start."""

    reason: Reason


def check_table(group: str, pages: list[int], tokens: Interval, page_size: int, num_pages: int) -> None:
    """Raises `ProtocolError` unless `tokens` lie in distinct, existing, non-null pages of a block table."""
    if tokens.empty:
        return
    last = (tokens.stop - 1) // page_size
    if last >= len(pages):
        raise ProtocolError(f"group {group!r}: token {tokens.stop - 1} is in page index {last}, table has {len(pages)}")
    used = pages[tokens.start // page_size : last + 1]
    if min(used) < 1 or max(used) >= num_pages:
        raise ProtocolError(f"group {group!r}: a page id is outside [1, {num_pages})")
    if len(set(used)) != len(used):
        raise ProtocolError(f"group {group!r}: a page id occurs twice in {tokens}")

"""Control messages between a prefill engine (P) and a decode engine (D). `frames.py` makes them bytes.

KV is addressed by token interval `[start, stop)` and block table (page id of token t at index
t // page_size); request ids do not occur: only an `AttemptKey` matches.
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
# A digest covers at most this many tokens, and never tokens on both sides of a multiple of it.
PIECE_TOKENS = 64
MAX_PIECES = MAX_TOKENS // PIECE_TOKENS
MAX_HASHES = 2048  # layers times planes
DIGEST_BYTES = 8
MAX_ROUNDS = 16
# Each of them is a copy of its own.
MAX_REPAIRS = 256
MAX_LEASE_S = 600.0
CHALLENGE_BYTES = 16

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]
# Printable ASCII: names and reasons end up in logs and metrics.
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[ -~]*\Z")]
Reason = Annotated[str, Meta(max_length=64, pattern=r"^[ -~]*\Z")]
Text = Annotated[str, Meta(max_length=2048)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
PageIds = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=MAX_PAGES)]
PageTables = Annotated[dict[Name, PageIds], Meta(max_length=MAX_GROUPS)]
Intervals = Annotated[dict[Name, Interval], Meta(max_length=MAX_GROUPS)]
Round = Annotated[int, Meta(ge=0, le=MAX_ROUNDS)]
BadIntervals = Annotated[list[Interval], Meta(max_length=MAX_REPAIRS)]
SeedsDigest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Pair = tuple[int, int]  # (source rank, destination rank)


class AttemptKey(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one attempt to hand one request over. Nothing else is ever matched on.

    `transfer_id` is 128 random bits from the router; the incarnations name the two processes (a restarted
    engine has another one), so that a message for a dead process can never reach its successor's state. Each pair of
    ranks that has bytes to move is an attempt of its own; the key of the whole is that of the pair (0, 0), which always
    comes.
    """

    transfer_id: TransferId
    attempt: Annotated[int, Meta(ge=0, lt=1 << 31)]
    prefill_incarnation: Name
    decode_incarnation: Name
    source_rank: Rank = 0
    dest_rank: Rank = 0

    @property
    def pair(self) -> Pair:
        """The source rank and the destination rank."""
        return self.source_rank, self.dest_rank

    @property
    def ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Process and rank on either side."""
        return (self.prefill_incarnation, self.source_rank), (self.decode_incarnation, self.dest_rank)

    def of_pair(self, pair: Pair) -> AttemptKey:
        """This attempt's key between two other ranks."""
        return msgspec.structs.replace(self, source_rank=pair[0], dest_rank=pair[1])

    def __str__(self) -> str:
        ranks = f" (ranks {self.source_rank} to {self.dest_rank})" if any(self.pair) else ""
        return f"{self.transfer_id.hex()}/{self.attempt}{ranks}"


class Seeds(msgspec.Struct, frozen=True):
    """What lets D start with a verification instead of recomputing the last prompt token.

    `first_token` is the token sampled at position n (n prompt tokens), `first_logprobs` its logprobs where
    asked for, `draft_token_ids` the drafter's guesses for positions n+1 and on. `drafter_states`: of a drafter of K
    modules that are used one after the other, the rows [K - 1, E], little-endian float32, that the later modules take
    from those before them at their first entries behind the prompt; else empty.
    """

    first_token: Token
    first_logprobs: TokenLogprobs | None = None
    draft_token_ids: Annotated[list[Token], Meta(max_length=MAX_DRAFTS)] = []
    drafter_states: Annotated[bytes, Meta(max_length=MAX_DRAFTER_STATES)] = b""


# Of a rank that does not sample. No vocabulary has such a token, so whoever took it for one would be found out.
NO_SEEDS = Seeds(first_token=(1 << 31) - 1)


class PieceDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digests of some tokens of one group, at most `PIECE_TOKENS` of them and never across a multiple of it:
    `DIGEST_BYTES` per layer and plane, layers by their ids, planes in the geometry's order.
    """

    tokens: Interval
    hashes: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES * MAX_HASHES)]


# By group, in token order.
Digests = Annotated[dict[Name, Annotated[list[PieceDigest], Meta(max_length=MAX_PIECES)]], Meta(max_length=MAX_GROUPS)]


class Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all messages."""


class Hello(Message, frozen=True, tag="HELLO"):
    """Opens a session: D's first says what its challenge is, P's answer proves P by it, D's second proves D by P's
    challenge and brings D's `descriptor` of the transport, P's second answer brings P's.

    `challenge` is random, the sender's own for this connection; `proof` is empty in D's first (`greeting.py`).
    """

    engine_id: Name
    incarnation: Name
    fingerprint: Annotated[dict[Name, Text], Meta(max_length=256)]
    instance: Instance
    challenge: Annotated[bytes, Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]
    proof: Annotated[bytes, Meta(max_length=32)] = b""
    descriptor: Annotated[bytes, Meta(max_length=1 << 16)] | None = None


class Bye(Message, frozen=True, tag="BYE"):
    """Ends a session. `quiet`: the sender's copies have all ended, and it will start no other."""

    reason: Reason
    quiet: bool = False


class Renew(Message, frozen=True, tag="RENEW"):
    """Keeps a session alive: the sender counts as alive for `lease` seconds after this arrives.

    The receiver sends the same `nonce` back with `echo` set, which measures the round trip; an echo renews
    the other direction. `stalled`: the agent lives, but the engine behind it hangs, so that nothing will come.
    """

    lease: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]
    nonce: Number
    echo: bool = False
    stalled: bool = False


class AttemptMessage(Message, frozen=True):
    """Base of the messages that belong to one attempt."""

    key: AttemptKey


class Announce(AttemptMessage, frozen=True, tag="ANNOUNCE"):
    """D to P: this leg waits here, and will be registered once P has admitted it. Carries the router's ticket."""

    ticket: TicketText


class Admitted(AttemptMessage, frozen=True, tag="ADMITTED"):
    """P to D: P has pages for the whole prompt, so that its prefill waits for nothing any more."""


class Register(AttemptMessage, frozen=True, tag="REGISTER"):
    """D to P: the intervals wanted per group and, for push, D's block tables. Carries the router's ticket."""

    ticket: TicketText
    wanted: Intervals
    pages: PageTables


class Ready(AttemptMessage, frozen=True, tag="READY"):
    """P to D, pull: P's block tables, and per group the end of the final interval `[0, final)`.

    `digests` cover what D wants of it; empty with integrity off.
    """

    final: Annotated[dict[Name, Position], Meta(max_length=MAX_GROUPS)]
    pages: PageTables
    digests: Digests = {}


class ReadDone(AttemptMessage, frozen=True, tag="READ_DONE"):
    """D to P, pull: all reads of this attempt are done."""


class Confirm(AttemptMessage, frozen=True, tag="CONFIRM"):
    """P to D, pull: the pages were this attempt's until READ_DONE came, so what was read is good.

    `seeds_digest` is empty with integrity off.
    """

    seeds: Seeds
    seeds_digest: SeedsDigest = b""


class Progress(AttemptMessage, frozen=True, tag="PROGRESS"):
    """P to D, push: the pieces that `digests` cover are copied and visible. D can check them while P prefills on.

    Never repeated: COMMIT brings the digests again.
    """

    digests: Digests


class Commit(AttemptMessage, frozen=True, tag="COMMIT"):
    """P to D, push: every copy is done and visible. `final` as in READY; the counts are for metrics.

    `round` counts the REPAIRs that P has carried out: D takes a COMMIT of the round that it waits for, and no
    other. `digests` and `seeds_digest` are empty with integrity off.
    """

    final: Annotated[dict[Name, Position], Meta(max_length=MAX_GROUPS)]
    seeds: Seeds
    num_bytes: Number = 0
    num_runs: Number = 0
    round: Round = 0
    digests: Digests = {}
    seeds_digest: SeedsDigest = b""


class Repair(AttemptMessage, frozen=True, tag="REPAIR"):
    """D to P, push: these tokens, in order, did not match their digests; where there are none, the seeds did not.

    P copies them again and sends COMMIT of this `round`, which is one above that of the COMMIT in question.
    """

    round: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)]
    bad: Annotated[dict[Name, BadIntervals], Meta(max_length=MAX_GROUPS)]


class Finished(AttemptMessage, frozen=True, tag="FINISHED"):
    """P to D: the first token ended the request. No copy is outstanding, no KV is needed."""

    seeds: Seeds


class Ack(AttemptMessage, frozen=True, tag="ACK"):
    """D to P: committed or finished. P may free."""


class Nack(AttemptMessage, frozen=True, tag="NACK"):
    """P to D: the REGISTER is refused. Proves nothing about memory: D still asks with CANCEL."""

    reason: Reason
    message: Text = ""


class Cancel(AttemptMessage, frozen=True, tag="CANCEL"):
    """Either side: the attempt is over; issue no more copies and tell when yours have ended."""

    reason: Reason
    message: Text = ""


class Cancelled(AttemptMessage, frozen=True, tag="CANCELLED"):
    """Either side: no copy issued by the sender is outstanding, and none will start, for this attempt."""

    reason: Reason


def check_table(group: str, pages: list[int], tokens: Interval, page_size: int, num_pages: int) -> None:
    """Check that `tokens` lie in distinct, existing, non-null pages of a block table.

    Raises `ProtocolError` naming the group. An empty interval needs no page.
    """
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

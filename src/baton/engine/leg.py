"""One open attempt of an engine, and the effects of its events on requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.request import Request
from baton.handoff.protocol.messages import Seeds
from baton.kv.interval import Interval
from baton.kv.tables import BlockTables
from baton.wire import KVStream, Recovery


@dataclass(slots=True, eq=False)
class Leg:
    """One open attempt."""

    request: Request
    attached: bool = True  # the request still waits for this handoff
    admitted: bool = False  # P has pages for the whole prompt
    ready: bool = False  # D: the request may be queued once P has admitted it
    sent_groups: frozenset[str] | None = None  # D: groups that P sends; None: all
    wanted: dict[str, Interval] = field(default_factory=dict)  # D: per group, the entries that P may write
    # D: per group, the end of the entries that digests have proven final.
    proven: dict[str, int] = field(default_factory=dict)
    quarantined: BlockTables | None = None  # D: pages that the request has given up
    registered: float = 0.0  # D: when it got pages, in monotonic seconds


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """`recoverable`: another attempt may succeed."""

    request: Request
    error: str
    recoverable: bool = False


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """The request decodes from the seeds, or has `finished` with them."""

    request: Request
    seeds: Seeds
    finished: bool


@dataclass(frozen=True, slots=True)
class PagesReleased:
    """P: the request's pages are no longer read."""

    request: Request


Effect = RequestFailed | RequestArrived | PagesReleased


@dataclass(frozen=True, slots=True)
class LegSettings:
    """What the legs of one engine have in common."""

    vocab_size: int
    max_drafts: int  # limit of the drafts with the first token
    recovery: Recovery
    handoff_timeout_s: float
    drafter_state_bytes: int = 0  # of `Seeds.drafter_states`; 0 if this engine's drafter needs none
    kv_stream: KVStream = "chunk"  # off: nothing is declared before the prefill ends

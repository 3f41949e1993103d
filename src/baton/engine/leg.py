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
    """One open attempt.

    `attached`: the request still waits for this handoff. `admitted`: P has pages for the whole prompt.

    On D, `ready`: the request may be queued once P has admitted it. `sent_groups`: groups that P sends (None: all).
    `wanted`: per group, the entries that P may write. `proven`: per group, the end of the entries that digests have
    proven final. `quarantined`: pages that the request has given up. `registered`: when it got pages, in monotonic
    seconds.
    """

    request: Request
    attached: bool = True
    admitted: bool = False
    ready: bool = False
    sent_groups: frozenset[str] | None = None
    wanted: dict[str, Interval] = field(default_factory=dict)
    proven: dict[str, int] = field(default_factory=dict)
    quarantined: BlockTables | None = None
    registered: float = 0.0


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
    """`max_drafts`: limit of the drafts with the first token. `drafter_state_bytes`: length of `Seeds.drafter_states`,
    0 if this engine's drafter needs none. `kv_stream` off: nothing is declared before the prefill ends."""

    vocab_size: int
    max_drafts: int
    recovery: Recovery
    handoff_timeout_s: float
    drafter_state_bytes: int = 0
    kv_stream: KVStream = "chunk"

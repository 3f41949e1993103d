"""One open attempt of an engine, and the effects of its events on requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.request import Request
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.phases import Phase
from baton.handoff.protocol.transitions import Table
from baton.kv.block_tables import BlockTables
from baton.kv.interval import Interval
from baton.wire import Integrity, KVStream, Recovery


class LegStatus(Phase):
    OPENED = "opened"
    READY = "ready"  # D: the request waits only for P's admission
    ADMITTED = "admitted"
    QUEUED = "queued"  # D: ready and admitted, so the request may have pages
    DETACHED = "detached"  # D: the request continues without this handoff; the agent has not released it yet


_L = LegStatus
LEG = Table(
    "Leg of an engine",
    {
        "ready": {_L.OPENED: _L.READY, _L.ADMITTED: _L.QUEUED, _L.DETACHED: _L.DETACHED},
        "admitted": {
            _L.OPENED: _L.ADMITTED,
            _L.READY: _L.QUEUED,
            **{phase: phase for phase in (_L.ADMITTED, _L.QUEUED, _L.DETACHED)},
        },
        "detach": dict.fromkeys(_L, _L.DETACHED),
    },
    {},
)


@dataclass(slots=True, eq=False)
class Leg:
    """`phase` follows the table `LEG`.

    On D, `sent_groups`: groups that P sends (None: all). `wanted`: the entries that P may write. `proven`: the end of
    the entries that digests have proven.
    """

    request: Request
    phase: LegStatus = LegStatus.OPENED
    sent_groups: frozenset[str] | None = None
    wanted: dict[str, Interval] = field(default_factory=dict)
    proven: dict[str, int] = field(default_factory=dict)
    quarantined: BlockTables | None = None  # D: pages that the request has given up
    registered: float = 0.0  # D: when it got pages, in monotonic seconds

    def step(self, event: str) -> None:
        """Raises `UndefinedTransitionError`."""
        self.phase = LEG.after(self.phase, event)

    @property
    def attached(self) -> bool:
        return self.phase is not LegStatus.DETACHED


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """`recoverable`: another attempt may succeed."""

    request: Request
    error: str
    recoverable: bool = False


@dataclass(frozen=True, slots=True)
class SeedsArrived:
    """The request decodes from the seeds, or has `finished` with them."""

    request: Request
    seeds: Seeds
    finished: bool


@dataclass(frozen=True, slots=True)
class PrefixArrived:
    """The first `num_tokens` tokens of the request's prompt are in the prefix cache."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PagesReleased:
    """No transport touches the pages of the request any more."""

    request: Request


Effect = RequestFailed | SeedsArrived | PrefixArrived | PagesReleased


@dataclass(frozen=True, slots=True)
class LegSettings:
    """Bounds for the seeds that P sends, and how far a failed handoff may be recovered. `handoff_timeout_s`: also how
    long a request waits for pages to recompute."""

    vocab_size: int
    max_drafts: int  # with the first token
    recovery: Recovery
    handoff_timeout_s: float
    drafter_state_bytes: int = 0  # of `Seeds.drafter_states`
    kv_stream: KVStream = "chunk"  # off: nothing is declared before the prefill ends
    integrity: Integrity = "off"  # the agent's, for traces

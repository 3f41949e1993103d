"""What the scheduler's half of the connector tells the worker's half, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.ticket import Ticket

Tables = tuple[list[int], ...]  # block tables, by vLLM's cache group


@dataclass(frozen=True, slots=True)
class OpenPrefill:
    """A prefill leg of `num_tokens` tokens arrived. `next_token` is the prompt's token after them, which the decode
    engine computes; None where this engine does not have it. `seeded`: it will be what this engine samples."""

    request_id: str
    ticket: Ticket
    num_tokens: int
    next_token: int | None
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """At the end of this step the first `num_computed` tokens went through target and drafter."""

    key: AttemptKey
    num_computed: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class ClosePrefill:
    """vLLM has finished a prefill request. `held`: it keeps the blocks until told that they may be freed; `failed`: not
    everything was computed, or nobody wants it. `sampled`: the first token, of a seeded leg."""

    key: AttemptKey
    held: bool
    failed: bool
    sampled: int | None = None


@dataclass(frozen=True, slots=True)
class AnnounceDecode:
    """A decode leg arrived. It has no blocks, and gets none before the prefill engine has admitted it. `next_token` is
    the one behind those that are handed over, which this engine computes."""

    request_id: str
    ticket: Ticket
    next_token: int


@dataclass(frozen=True, slots=True)
class OpenDecode:
    """Blocks are there for a decode leg of `num_tokens` tokens, of which the first `hit` are in place. `parked`: the
    request waits for the rest; else nothing is wanted, and the other side is only to be told so."""

    request_id: str
    ticket: Ticket
    num_tokens: int
    hit: int
    tables: Tables
    parked: bool


@dataclass(slots=True)
class Step:
    """Everything new. `turned_away`: prefill legs that are served without a handoff; `admitted`: those that have blocks
    and are computed now; `aborted`: decode legs that are given up; `preempted`: prefill legs whose blocks are about to
    be used by others; `cancelled`: those that nobody will fetch."""

    opened: list[OpenPrefill] = field(default_factory=list)
    turned_away: list[Ticket] = field(default_factory=list)
    admitted: list[AttemptKey] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    closed: list[ClosePrefill] = field(default_factory=list)
    announced: list[AnnounceDecode] = field(default_factory=list)
    receives: list[OpenDecode] = field(default_factory=list)
    aborted: list[AttemptKey] = field(default_factory=list)
    preempted: list[AttemptKey] = field(default_factory=list)
    cancelled: list[AttemptKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        news = (self.opened, self.admitted, self.computed, self.closed, self.announced, self.receives)
        return any((*news, self.turned_away, self.aborted, self.preempted, self.cancelled))

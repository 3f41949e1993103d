"""Messages from the connector's half in the scheduler to its half in the worker, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.ticket import SignedTicket

Tables = tuple[list[int], ...]  # block tables, by vLLM's cache group


@dataclass(frozen=True, slots=True)
class OpenPrefill:
    """A prefill leg of `num_tokens` tokens arrived. `next_token` is the prompt's token behind them, which the decode
    engine computes; None if this engine's prompt ends before it. `seeded`: this engine samples that token itself."""

    request_id: str
    ticket: SignedTicket
    num_tokens: int
    next_token: int | None
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """After this step target and drafter have computed the first `num_computed` tokens."""

    key: AttemptKey
    num_computed: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class ClosePrefill:
    """vLLM has finished a prefill request. `held`: vLLM keeps the blocks until the worker reports that they may be
    freed. `failed`: the prompt was not computed to its end, or nobody wants it. `sampled`: the first token of a seeded
    leg."""

    key: AttemptKey
    held: bool
    failed: bool
    sampled: int | None = None


@dataclass(frozen=True, slots=True)
class AnnounceDecode:
    """A decode leg arrived. It has no blocks, and gets none before the prefill engine has admitted it. `next_token` is
    the prompt's token behind those that are handed over; this engine computes it."""

    request_id: str
    ticket: SignedTicket
    next_token: int


@dataclass(frozen=True, slots=True)
class OpenDecode:
    """vLLM has given blocks to a decode leg of `num_tokens` tokens, of which the first `hit` are in place. `parked`:
    the request waits for the rest. Else nothing is wanted, and the prefill engine only has to be told so."""

    request_id: str
    ticket: SignedTicket
    num_tokens: int
    hit: int
    tables: Tables
    parked: bool


@dataclass(slots=True)
class StepNews:
    """All news of one step. `turned_away`: prefill legs that are served without a handoff. `admitted`: prefill legs
    that have got blocks. `aborted`: decode legs that vLLM has given up. `preempted`: prefill legs whose blocks go to
    other requests. `cancelled`: prefill legs that no decode engine will fetch."""

    opened: list[OpenPrefill] = field(default_factory=list)
    turned_away: list[SignedTicket] = field(default_factory=list)
    admitted: list[AttemptKey] = field(default_factory=list)
    computed: list[ComputedTokens] = field(default_factory=list)
    closed: list[ClosePrefill] = field(default_factory=list)
    announced: list[AnnounceDecode] = field(default_factory=list)
    receives: list[OpenDecode] = field(default_factory=list)
    aborted: list[AttemptKey] = field(default_factory=list)
    preempted: list[AttemptKey] = field(default_factory=list)
    cancelled: list[AttemptKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        news = (self.opened, self.admitted, self.computed, self.closed, self.announced, self.receives)
        return any((*news, self.turned_away, self.aborted, self.preempted, self.cancelled))

"""Messages from `SchedulerSide` to the `WorkerSide`s, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.ticket import SignedTicket

Tables = tuple[list[int], ...]  # block tables, by vLLM's cache group


@dataclass(frozen=True, slots=True)
class OpenPrefill:
    """A prefill leg of `num_tokens` tokens arrived. `next_token`: the prompt's token after them, which D computes;
    None if this engine's prompt ends before it. `seeded`: COMMIT contains the token that this engine samples."""

    request_id: str
    ticket: SignedTicket
    num_tokens: int
    next_token: int | None
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """After this step, target and drafter have computed the first `num_computed` tokens."""

    key: AttemptKey
    num_computed: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class ClosePrefill:
    """vLLM has finished a prefill request. `held`: vLLM keeps the blocks until the worker reports them free. `failed`:
    the leg cannot be committed or is not wanted any more. `sampled`: the first token of a seeded leg."""

    key: AttemptKey
    held: bool
    failed: bool
    sampled: int | None = None


@dataclass(frozen=True, slots=True)
class AnnounceDecode:
    """A decode leg arrived. `next_token`: the prompt's token after the handed-over ones, computed by this engine."""

    request_id: str
    ticket: SignedTicket
    next_token: int
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class OpenDecode:
    """vLLM gave blocks to a decode leg of `num_tokens` tokens, the first `hit` are in place. `parked`: the request
    waits for the rest; else no KV is wanted, but P must be notified. `whole_blocks`: all of a window's first block is
    wanted.
    """

    request_id: str
    ticket: SignedTicket
    num_tokens: int
    hit: int
    tables: Tables
    parked: bool
    whole_blocks: bool = False
    admitted: bool = True


@dataclass(slots=True)
class StepNews:
    """Prefill legs: `turned_away` are served without a handoff, `admitted` now have blocks, those of `preempted` go to
    other requests, `cancelled` will not be fetched, `missing` lack what a hand-back wants. `aborted`: decode legs that
    vLLM gave up.
    """

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
    missing: list[AttemptKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

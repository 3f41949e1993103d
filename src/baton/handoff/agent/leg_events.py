"""Events that an engine posts to an agent, by attempt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from baton.handoff.plan.tables import copy_tables
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.kv.interval import Interval


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """P's leg of a verified ticket. D's claim may come before."""

    ticket: SignedTicket


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """D's leg of a verified ticket, before it has pages: `DecodeAdmitted` says when to allocate them. Does not expire
    while P lives.
    """

    ticket: SignedTicket


@dataclass(frozen=True, slots=True)
class DecodePages:
    """The pages of D's leg. Follows `DecodeAdmitted`; or comes before, if the engine has pages for all requests that P
    admits (docs/protocol.md, "No deadlock"). `admitted`: False if P may still wait for pages, without a limit.
    """

    ticket: SignedTicket
    prompt_len: int
    wanted: dict[str, Interval]
    pages: dict[str, list[int]]
    admitted: bool = True


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Ends an attempt of either side; the peer is sent `message`. The pages stay the agent's until released.

    `taken` is called on the agent's thread, after the attempt's final events, even if the peer is gone. From then on
    this side sends COMMIT or CONFIRM only for data already in place.
    """

    reason: str
    message: str = "given up by the engine"
    taken: Callable[[], None] | None = None


PrefillEvent = ev.PagesGiven | ev.Declared | ev.LayersWritten | ev.LayersWithdrawn | ev.Sampled
LegEvent = PrefillLeg | DecodeLeg | DecodePages | GiveUp | PrefillEvent


class Agent(ABC):
    """Takes events from any thread, without blocking. Block tables are copied, since the engine's grow."""

    @abstractmethod
    def post(self, key: AttemptKey, event: LegEvent) -> None:
        """`key`: the ticket's; for a rank's agent, that of its pair of ranks.

        Raises `ProtocolError` if the ticket of a leg names another engine, or an interval exceeds the prompt.
        """

    def open_prefill(self, ticket: SignedTicket) -> None:
        self.post(ticket.key, PrefillLeg(ticket))

    def admit_prefill(self, key: AttemptKey) -> None:
        self.post(key, ev.PagesGiven())

    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None:
        """Post that tokens `[0, final)` of each group are final on every rank."""
        self.post(key, ev.Declared(prompt_len, copy_tables(pages), dict(final)))

    def stream_layers(self, key: AttemptKey, event: ev.LayersWritten | ev.LayersWithdrawn) -> None:
        """Layers that every rank with them has written. `declare_final` follows the forward."""
        self.post(key, event)

    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool, final: dict[str, int]) -> None:
        """Post `Sampled`. The tables of the last `declare_final` must reach as far as `final`."""
        self.post(key, ev.Sampled(seeds, finished, dict(final)))

    def announce_decode(self, ticket: SignedTicket) -> None:
        self.post(ticket.key, DecodeLeg(ticket))

    def open_decode(
        self,
        ticket: SignedTicket,
        prompt_len: int,
        wanted: dict[str, Interval],
        pages: dict[str, list[int]],
        admitted: bool = True,
    ) -> None:
        self.post(ticket.key, DecodePages(ticket, prompt_len, dict(wanted), copy_tables(pages), admitted))

    def abort(self, key: AttemptKey, reason: str, taken: Callable[[], None] | None = None) -> None:
        self.post(key, GiveUp(reason, taken=taken))

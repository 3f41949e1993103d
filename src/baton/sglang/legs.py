"""The legs of requests: SGLang's scheduler calls and polls them; the handoff agent's events decide their phase.

A leg ends only when no copy touches its pages any more. The tensor ranks agree on a failure before one reports it
(`agree`, docs/sglang.md). The scheduler's thread calls all but `post`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.errors import HandoffError, ProtocolError, reason_label
from baton.handoff.agent.leg_events import Agent
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.handoff.protocol.ticket import Redeemer, SignedTicket, request_digest
from baton.kv.geometry import NULL_PAGE
from baton.log_limit import LogLimit
from baton.sampling_params import SamplingParams
from baton.sglang.geometry import BufferLayout, RequestPages
from baton.wire import LegRole

log = logging.getLogger(__name__)
log.addFilter(LogLimit())
# A slower agent hangs, and may still commit the leg, so the server must end.
ABORT_TIMEOUT_S = 60.0

# ready: D may allocate pages; P may compute. moving: the pages are known.
LegPhase = Literal["waiting", "ready", "moving", "done", "failed"]
# The minimum of each entry over the tensor ranks. Collective.
Least = Callable[[list[int]], list[int]]


def prompt_digest(tokens: Sequence[int]) -> bytes:
    """A ticket's request digest for SGLang servers, over the prompt."""
    return request_digest(tokens, SamplingParams())


@dataclass(slots=True, eq=False)
class RankLeg:
    """`why`: the reason of a failure. A leg without a `ticket` was refused. `agreed`: the phase that all tensor ranks
    may act on.
    """

    num_tokens: int
    ticket: SignedTicket | None
    phase: LegPhase = "waiting"
    why: str = ""
    aborted: bool = False
    agreed: LegPhase = "waiting"

    def fail(self, why: str) -> None:
        self.phase, self.why = "failed", self.why or why


@dataclass(slots=True, eq=False)
class SenderLeg(RankLeg):
    """P's leg. `pages`: of the first `num_sent` tokens."""

    admitted: bool = False
    num_sent: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ReceiverLeg(RankLeg):
    """D's leg. `opened`: the agent has its pages. `seeds`: set when it is done."""

    opened: bool = False
    seeds: Seeds | None = None


class RankLegs:
    """The legs of one rank. `counts`: handoffs by outcome, and the `bytes` and `runs` of committed ones."""

    def __init__(
        self,
        layout: BufferLayout,
        redeemer: Redeemer,
        synchronize: Callable[[], None] = lambda: None,
        abort_timeout: float = ABORT_TIMEOUT_S,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._layout = layout
        self._redeemer = redeemer
        self._synchronize = synchronize
        self._abort_timeout = abort_timeout
        self._events: queue.SimpleQueue[ev.HandoffEvent] = queue.SimpleQueue()
        self._legs: dict[AttemptKey, RankLeg] = {}
        self._agent: Agent | None = None

    def bind(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def agent(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def post(self, event: ev.HandoffEvent) -> None:
        """Called on the agent's thread."""
        self._events.put(event)

    def poll(self, leg: RankLeg) -> LegPhase:
        while True:
            try:
                self._on_event(self._events.get_nowait())
            except queue.Empty:
                return leg.phase

    def rest(self, seconds: float) -> None:
        """Wait for the agent's next event, if a leg is in flight: polling would keep the GIL from its thread."""
        if self._legs:
            with contextlib.suppress(queue.Empty):
                self._on_event(self._events.get(timeout=seconds))

    def agree(self, legs: Sequence[RankLeg], least: Least) -> None:
        """Set `agreed` to the phase. A leg that failed on some rank is given up here too, and counts as failed once it
        has ended on all. Collective."""
        phases = [self.poll(leg) for leg in legs]
        sound = [int(phase != "failed") for phase in phases]
        ended = [int(phase in ("done", "failed")) for phase in phases]
        minima = least(sound + ended)
        for index, (leg, phase) in enumerate(zip(legs, phases, strict=True)):
            if minima[index] or minima[len(legs) + index]:
                leg.agreed = phase
                continue
            if not ended[index]:
                leg.why = leg.why or "the request failed on another tensor rank"
                self.abort(leg)
            if phase != "failed":
                leg.agreed = "moving" if phase == "done" else phase

    # ------------------------------------------------------------ prefill

    def open_prefill(self, ticket: str | None, tokens: Sequence[int]) -> SenderLeg:
        """A leg may be computed at once; a refused one has failed."""
        leg = SenderLeg(len(tokens), None)
        self._redeem(leg, ticket, "prefill", tokens)
        if leg.ticket is not None:
            leg.phase = "ready"
            self.agent.open_prefill(leg.ticket)
        return leg

    def scheduled(self, leg: SenderLeg) -> None:
        """The request has pages. Only now may D hold pages for it, or the servers could deadlock."""
        if leg.ticket is not None and not leg.admitted and leg.phase != "failed":
            leg.admitted = True
            self.agent.admit_prefill(leg.ticket.key)

    def computed(self, leg: SenderLeg, pages: RequestPages, num_tokens: int, seeds: Callable[[], Seeds]) -> None:
        """`num_tokens` more tokens are computed, in `pages`. The last call also has the pages of windows and states,
        and calls `seeds`."""
        if leg.ticket is None or leg.aborted or leg.phase == "failed":
            return
        self.scheduled(leg)
        leg.pages.extend(pages.all)
        leg.num_sent += num_tokens
        self._synchronize()
        key, final = leg.ticket.key, self._layout.final(leg.num_tokens, leg.num_sent)
        tables = self._layout.tables(leg.num_tokens, replace(pages, all=leg.pages))
        self.agent.declare_final(key, leg.num_tokens, tables, final)
        leg.phase = "moving"
        if leg.num_sent == leg.num_tokens:
            self.agent.finish_prefill(key, seeds(), False, {})

    # ------------------------------------------------------------ decode

    def open_decode(self, ticket: str | None, tokens: Sequence[int]) -> ReceiverLeg:
        """The leg gets no pages before it is ready."""
        leg = ReceiverLeg(len(tokens), None)
        self._redeem(leg, ticket, "decode", tokens)
        if leg.ticket is not None:
            self.agent.announce_decode(leg.ticket)
        return leg

    def place(self, leg: ReceiverLeg, hit: int, pages: RequestPages) -> None:
        """The leg has pages for its tokens from `hit` on, where a page begins."""
        if leg.ticket is None or leg.aborted or leg.phase == "failed":
            return
        wanted = self._layout.wanted(leg.num_tokens, hit)
        if self._layout.below(wanted, hit):
            # The drafter's entry of the last prompt token belongs to another prompt, and its page is shared.
            leg.why = "the decode server's prefix hit covers the whole prompt, and the drafter's last entry must move"
            self.abort(leg)
            return
        self._synchronize()
        leg.opened, leg.phase = True, "moving"
        table = [NULL_PAGE] * (hit // self._layout.page_size) + list(pages.all)
        tables = self._layout.tables(leg.num_tokens, replace(pages, all=table))
        self.agent.open_decode(leg.ticket, leg.num_tokens, wanted, tables)

    def abort(self, leg: RankLeg) -> None:
        """Give a leg up. On return a prefill leg's pages may be freed; a decode leg's when the leg has failed.

        Raises `HandoffError`.
        """
        if leg.ticket is None or leg.aborted or leg.phase in ("done", "failed"):
            return
        leg.aborted, leg.why = True, leg.why or "aborted"
        accepted: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.agent.abort(leg.ticket.key, "aborted", lambda: accepted.put(None))
        try:
            accepted.get(timeout=self._abort_timeout)
        except queue.Empty:
            raise HandoffError("not_answering", "the handoff agent does not give up an aborted request") from None

    def _redeem(self, leg: RankLeg, ticket: str | None, role: LegRole, tokens: Sequence[int]) -> None:
        try:
            if not ticket:
                raise ProtocolError("the request has no ticket: send it to Baton's router")
            leg.ticket = self._redeemer.redeem(ticket, role, prompt_digest(tokens), time.monotonic())
        except ProtocolError as error:
            self.counts["refused"] += 1
            leg.fail(str(error))
            return
        self._legs[leg.ticket.key] = leg

    def _on_event(self, event: ev.HandoffEvent) -> None:
        leg = self._legs.get(event.key)
        if leg is None:
            return
        match event:
            case ev.DecodeAdmitted():
                if leg.phase == "waiting" and not leg.aborted:
                    leg.phase = "ready"
                return
            case ev.DecodeFailed(_, reason, message):
                self.counts[f"failed_{reason_label(reason)}"] += 1
                log.warning("handoff %s failed: %s: %s", event.key, reason, message)
                leg.why = f"{reason}: {message}"
                return
            case ev.DecodeProgress():
                return
            case ev.PrefillReleased(_, outcome):
                good = outcome in ("committed", "finished")
                self.counts[f"prefill_{outcome if good else reason_label(outcome)}"] += 1
                if good:
                    leg.phase = "done"
                else:
                    leg.fail(outcome)
            case ev.DecodeCommitted(_, seeds, num_bytes, num_runs):
                self.counts.update(committed=1, bytes=num_bytes, runs=num_runs)
                assert isinstance(leg, ReceiverLeg)
                leg.seeds = seeds
                if leg.aborted:
                    leg.fail("aborted")
                else:
                    leg.phase = "done"
            case _:  # DecodeFinished, DecodeReleased
                self.counts["released"] += 1
                leg.fail("the prefill server gave the request up")
        del self._legs[event.key]

"""Presents the agents of all ranks of an engine as one agent (docs/protocol.md, "Many ranks")."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.agent.leg_events import Agent, DecodeLeg, DecodePages, GiveUp, LegEvent, PrefillLeg
from baton.handoff.plan.topology import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.gather import LEAD, DecodeGather, EndPair, PrefillGather, pairs_of
from baton.handoff.protocol.messages import NO_SEEDS, AttemptKey, Pair
from baton.handoff.protocol.ticket import SignedTicket

T = TypeVar("T")
MAX_PEERS = 1024
MAX_ENDED = 4096
P, D = 0, 1  # the index of a side's rank in a pair


@dataclass(slots=True, eq=False)
class _Leg:
    """One side of a request. `pairs`: with open attempts, at first the leading one. `events`: to replay on pairs opened
    later. `ended`: why no further pair is opened.
    """

    ticket: SignedTicket
    side: int
    lead: Pair
    pairs: Mapping[Pair, frozenset[str] | None]
    gather: PrefillGather | DecodeGather | None = None
    events: dict[type[LegEvent], LegEvent] = field(default_factory=dict)
    end_reported: bool = False
    ended: str = ""


class InstanceAgent(Agent):
    """`bind` sets the agents. If ranks are apart, only that of `instance.rank`, and a request ends when that rank's
    pairs have ended.
    """

    def __init__(self, instance: Instance, on_event: Callable[[ev.HandoffEvent], None]) -> None:
        self.instance = instance
        self._on_event = on_event
        self._agents: dict[int, Agent] = {}
        self._first = instance.rank if instance.apart else 0
        self._legs: dict[AttemptKey, _Leg] = {}
        # Recently ended requests; the engine may still name them. P's leg is kept if D's ranks were unknown, to notify
        # each when it connects.
        self._ended: dict[AttemptKey, _Leg | None] = {}
        self._peers: dict[str, Instance] = {}  # by incarnation
        self._lock = threading.RLock()
        # Events for the engine, in order. One thread at a time delivers them, without the lock.
        self._undelivered: deque[ev.HandoffEvent] = deque()
        self._delivering = False

    def bind(self, agents: Sequence[Agent]) -> None:
        """The agents' events go to `on_event` and `on_peer`.

        Raises `ProtocolError` unless each rank in this process has one.
        """
        needed = 1 if self.instance.apart else self.instance.num_ranks
        if len(agents) != needed:
            raise ProtocolError(f"{len(agents)} agents for {needed} ranks")
        self._agents = dict(enumerate(agents, self._first))

    def post(self, key: AttemptKey, event: LegEvent) -> None:
        """Each pair of ranks gets its groups' part. `GiveUp.taken` is called when all ranks have done so. Raises
        `ProtocolError` also for a wanted group that no rank has."""
        match event:
            case PrefillLeg(ticket):
                self._begin(ticket, P, ticket.decode_addresses)
            case DecodeLeg(ticket):
                self._begin(ticket, D, ticket.prefill_addresses)
            case GiveUp():
                self._give_up(key, event)
            case DecodePages(ticket, _, wanted):
                if missing := sorted(wanted.keys() - self.instance.groups.keys()):
                    raise ProtocolError(f"groups {missing} are on no rank")
                if not self._passes(ticket.prefill_addresses):
                    self._begin(ticket, D, ticket.prefill_addresses)
                self._to_pairs(key, event, D)
            case _:
                self._to_pairs(key, event)

    def _give_up(self, key: AttemptKey, event: GiveUp) -> None:
        with self._lock:
            leg = self._legs.get(key)
            if leg is None:
                self._agents[self._first].post(key, event)
                return
            leg.ended = event.reason
            left = list(leg.pairs)

            def one_has() -> None:
                with self._lock:
                    left.pop()
                    if left or event.taken is None:
                        return
                event.taken()

            for pair in list(left):
                self._to(pair, leg, replace(event, taken=one_has))

    def _passes(self, others: Sequence[str]) -> bool:
        return self.instance.num_ranks == len(others) == 1

    def _leading_pair(self, side: int) -> Pair:
        return (self._first, 0) if side == P else (0, self._first)

    def _begin(self, ticket: SignedTicket, side: int, others: Sequence[str]) -> None:
        with self._lock:
            if self._passes(others):
                self._agents[0].post(ticket.key, self._opening(ticket, side))
            elif ticket.key not in self._legs and ticket.key not in self._ended:
                lead = self._leading_pair(side)
                leg = self._legs[ticket.key] = _Leg(ticket, side, lead, {lead: None})
                self._to(lead, leg, self._opening(ticket, side))
                self._open_pairs(leg, self._peers.get(ticket.key.ends[1 - side][0]))

    def _to(self, pair: Pair, leg: _Leg, event: LegEvent) -> None:
        self._agents[pair[leg.side]].post(leg.ticket.key.of_pair(pair), event)

    @staticmethod
    def _opening(ticket: SignedTicket, side: int) -> LegEvent:
        return PrefillLeg(ticket) if side == P else DecodeLeg(ticket)

    def _open_pairs(self, leg: _Leg, peer: Instance | None) -> None:
        ticket, own = leg.ticket, self.instance
        named = ticket.decode_addresses if leg.side == P else ticket.prefill_addresses
        if peer is None or leg.gather is not None or leg.ended or len(named) != peer.num_ranks:
            return  # the ticket names other ranks: refused, as is the open pair
        key = ticket.key
        try:
            own = own.only(peer.groups)  # drafters' KV that is not moved is not named by the peer
            every = pairs_of(own, peer) if leg.side == P else pairs_of(peer, own)
        except IncompatiblePeerError:
            return  # the whole session is refused
        leg.pairs = own_pairs = {pair: groups for pair, groups in every.items() if pair[leg.side] in self._agents}
        leg.gather = PrefillGather(key, own_pairs) if leg.side == P else DecodeGather(key, own_pairs, peer.sampling)
        for pair, groups in own_pairs.items():
            if pair != leg.lead:
                self._to(pair, leg, self._opening(leg.ticket, leg.side))
            for event in leg.events.values():
                if pair != leg.lead or leg.side == D:  # P's leading pair got the event at once
                    self._to(pair, leg, self._of_pair(event, pair, groups))

    def _abort_unopened_pairs(self, leg: _Leg) -> None:
        """D gives up before it knows P's ranks. If these are apart, only one knows D, and the others hold pages: open
        an attempt with each only to abort it.
        """
        for rank in range(1, len(leg.ticket.prefill_addresses)) if leg.lead == LEAD else ():
            if (pair := (rank, 0)) not in leg.pairs:
                leg.pairs = {**leg.pairs, pair: None}
                self._to(pair, leg, DecodeLeg(leg.ticket))
                self._to(pair, leg, GiveUp(leg.ended or "aborted"))

    def _to_pairs(self, key: AttemptKey, event: LegEvent, side: int = P) -> None:
        with self._lock:
            leg = self._legs.get(key)
            if leg is not None:
                leg.events[ev.LayersWritten if isinstance(event, ev.LayersWithdrawn) else type(event)] = event
                # D does not know which pair gets which groups until P's HELLO names its ranks. P's leading pair takes
                # everything.
                if leg.side == P or leg.gather is not None:
                    for pair, groups in leg.pairs.items():
                        self._to(pair, leg, self._of_pair(event, pair, groups))
                return
        self._agents[self._first].post(key.of_pair(self._leading_pair(side)), event)

    def _of_pair(self, event: LegEvent, pair: Pair, groups: frozenset[str] | None) -> LegEvent:
        match event:
            case ev.Declared(prompt_len, pages, final):
                return ev.Declared(prompt_len, _restrict(pages, groups), _restrict(final, groups))
            case ev.Sampled(seeds, finished, final):
                own = seeds if pair[P] == self.instance.sampling else NO_SEEDS
                return ev.Sampled(own, finished, _restrict(final, groups))
            case DecodePages(_, _, wanted, pages):
                return replace(event, wanted=_restrict(wanted, groups), pages=_restrict(pages, groups))
            case _:
                return event

    # ------------------------------------------------------------ called by the agents, each on its thread

    def on_peer(self, key: AttemptKey, peer: Instance) -> None:
        pair, key = key.pair, key.of_pair(LEAD)
        with self._lock:
            late = key not in self._legs
            leg = self._ended.get(key) if late else self._legs[key]
            if leg is not None and leg.side == P and leg.ended and pair not in leg.pairs:
                leg.pairs = {**leg.pairs, pair: None}
                self._to(pair, leg, PrefillLeg(leg.ticket))
                self._to(pair, leg, GiveUp(leg.ended))
            if leg is None and pair == self._leading_pair(P) and key not in self._ended:
                # D's claim came before P's leg, which then opens all pairs at once.
                self._remember_peer(key.ends[D][0], peer)
            if leg is None or leg.ended or pair != leg.lead:
                return
            self._remember_peer(key.ends[1 - leg.side][0], peer)
            self._legs[key] = leg
            self._open_pairs(leg, peer)
            if late:
                self._on_pair_event(leg, leg.lead, ev.PrefillReleased(key, "finished"))
        self._deliver_events()

    def _remember_peer(self, incarnation: str, peer: Instance) -> None:
        self._peers[incarnation] = peer
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def on_event(self, event: ev.HandoffEvent) -> None:
        with self._lock:
            leg = self._legs.get(event.key.of_pair(LEAD))
            if leg is not None:
                self._on_pair_event(leg, event.key.pair, event)
            elif event.key.pair == LEAD:
                self._undelivered.append(event)
        self._deliver_events()

    def _deliver_events(self) -> None:
        while True:
            with self._lock:
                if self._delivering or not self._undelivered:
                    return
                self._delivering, event = True, self._undelivered.popleft()
            try:
                self._on_event(event)
            finally:
                self._delivering = False

    def _on_pair_event(self, leg: _Leg, pair: Pair, event: ev.HandoffEvent) -> None:
        key, gather = leg.ticket.key, leg.gather
        if gather is None and pair != leg.lead:
            return
        if gather is None and isinstance(event, ev.DecodeFailed | ev.DecodeReleased):
            self._abort_unopened_pairs(leg)
        actions: Sequence[ev.HandoffEvent | EndPair] = [replace(event, key=key)]
        if isinstance(gather, DecodeGather):
            actions = gather.handle(pair, event)
        elif gather is not None:
            actions = gather.handle(pair, event) if isinstance(event, ev.PrefillReleased) else []
        for action in actions:
            if isinstance(action, EndPair):
                self._to(action.pair, leg, GiveUp(action.reason, action.message))
            elif self._note_for_engine(leg, action):
                self._undelivered.append(action)

    def _note_for_engine(self, leg: _Leg, event: ev.HandoffEvent) -> bool:
        """Record an event of the whole leg. Returns whether the engine is to get it."""
        match event:
            case ev.DecodeFailed():
                # Otherwise the engine itself gave up: another rank told P, and P told this one.
                is_first, leg.ended = not leg.ended, leg.ended or event.reason
                return is_first
            case ev.PrefillReleased() | ev.DecodeCommitted() | ev.DecodeFinished() | ev.DecodeReleased():
                return self._end_leg(leg, event)
            case _:
                return True

    def _end_leg(self, leg: _Leg, event: ev.HandoffEvent) -> bool:
        key = leg.ticket.key
        del self._legs[key]
        if isinstance(event, ev.PrefillReleased) and event.outcome != "finished":
            leg.ended = leg.ended or event.outcome
        for what in (ev.Declared, ev.LayersWritten):  # its pages are free, and another request may have them
            leg.events.pop(what, None)
        self._ended[key] = leg if leg.side == P and leg.gather is None else None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        reported, leg.end_reported = leg.end_reported, True
        return not reported


def _restrict(found: dict[str, T], groups: frozenset[str] | None) -> dict[str, T]:
    return found if groups is None else {group: what for group, what in found.items() if group in groups}

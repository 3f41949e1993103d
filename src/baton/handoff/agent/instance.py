"""Presents the agents of all ranks of an engine as one agent.

Each rank has an agent, and each pair of ranks that has bytes to move is an attempt of its own. One pair leads: it is
opened before the other side's ranks are known, and its HELLO lists them. It is the pair of ranks 0 and 0. In an engine
whose ranks are apart, each process has only its own rank's pairs; the one with rank 0 of the other side leads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan.topology import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.gather import LEAD, DecodeGather, EndPair, PrefillGather, pairs_of
from baton.handoff.protocol.messages import NO_SEEDS, AttemptKey, Pair, Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.kv.interval import Interval

T = TypeVar("T")
MAX_PEERS = 1024
MAX_ENDED = 4096
P, D = 0, 1  # a side, and the index of its rank in a pair


class Agent(Protocol):
    """The calls of `baton.handoff.agent.agent.HandoffAgent` that an engine uses. From any thread; none blocks."""

    def open_prefill(self, ticket: SignedTicket) -> None: ...
    def admit_prefill(self, key: AttemptKey) -> None: ...
    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None: ...
    def stream_layers(self, key: AttemptKey, event: ev.LayersWritten | ev.LayersWithdrawn) -> None: ...
    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool, final: dict[str, int]) -> None: ...
    def announce_decode(self, ticket: SignedTicket) -> None: ...
    def open_decode(
        self, ticket: SignedTicket, prompt_len: int, wanted: dict[str, Interval], pages: dict[str, list[int]]
    ) -> None: ...
    def abort(self, key: AttemptKey, reason: str, taken: Callable[[], None] | None = None) -> None: ...


class RankAgent(Agent, Protocol):
    """One rank's agent. Its attempts are with one rank `peer` of the other engine."""

    def open_prefill(self, ticket: SignedTicket, peer: int = 0) -> None: ...
    def announce_decode(self, ticket: SignedTicket, peer: int = 0) -> None: ...
    def open_decode(
        self,
        ticket: SignedTicket,
        prompt_len: int,
        wanted: dict[str, Interval],
        pages: dict[str, list[int]],
        peer: int = 0,
    ) -> None: ...
    def abort(
        self,
        key: AttemptKey,
        reason: str,
        taken: Callable[[], None] | None = None,
        message: str = ...,
    ) -> None: ...


# A call of the engine, repeated to each agent with its pair's groups (None: all).
PairCall = Callable[[RankAgent, Pair, frozenset[str] | None], None]


@dataclass(slots=True, eq=False)
class _Leg:
    """One half of a request. `pairs`: those with open attempts, at first the leading one. `calls`: calls to replay on
    pairs opened later. `end_reported`: the engine knows that its pages are free. `ended`: why no further pair is
    opened."""

    ticket: SignedTicket
    side: int
    lead: Pair
    pairs: Mapping[Pair, frozenset[str] | None]
    gather: PrefillGather | DecodeGather | None = None
    calls: dict[str, PairCall] = field(default_factory=dict)
    end_reported: bool = False
    ended: str = ""


class InstanceAgent:
    """The agents of all ranks of `instance` as one `Agent`; `bind` sets them. If ranks are apart, there is only the
    agent of `instance.rank`, and a request ends when that rank's pairs have. `on_event` is called once per request.

    With one rank on both sides, calls and events pass through.
    """

    def __init__(self, instance: Instance, on_event: Callable[[ev.HandoffEvent], None]) -> None:
        self._instance = instance
        self._on_event = on_event
        self._agents: dict[int, RankAgent] = {}
        # The rank whose agent has the leading pair: 0, or the only one here if ranks are apart.
        self._first = instance.rank if instance.apart else 0
        self._legs: dict[AttemptKey, _Leg] = {}
        # Requests that ended lately: the engine may name one until it learns of its end. P's leg is kept if D's ranks
        # were still unknown: each of them is told of the end when it connects.
        self._ended: dict[AttemptKey, _Leg | None] = {}
        self._peers: dict[str, Instance] = {}  # by incarnation
        self._lock = threading.RLock()
        # Events for the engine, in order. One thread at a time delivers them, without the lock.
        self._undelivered: deque[ev.HandoffEvent] = deque()
        self._delivering = False

    def bind(self, agents: Sequence[RankAgent]) -> None:
        """Use these agents, whose events go to `on_event` and `on_peer`.

        Raises `ProtocolError` unless there is one for each rank in this process.
        """
        needed = 1 if self._instance.apart else self._instance.num_ranks
        if len(agents) != needed:
            raise ProtocolError(f"{len(agents)} agents for {needed} ranks")
        self._agents = dict(enumerate(agents, self._first))

    # ------------------------------------------------------------ the engine's calls

    def open_prefill(self, ticket: SignedTicket) -> None:
        self._begin(ticket, P, ticket.decode_addresses)

    def admit_prefill(self, key: AttemptKey) -> None:
        self._call_pairs(key, "admitted", lambda agent, pair, groups: agent.admit_prefill(key.of_pair(pair)))

    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None:
        """Final means on every rank."""
        # Copies, because the engine's own tables grow.
        tables = {group: list(table) for group, table in pages.items()} if key in self._legs else pages

        def declare(agent: RankAgent, pair: Pair, groups: frozenset[str] | None) -> None:
            agent.declare_final(key.of_pair(pair), prompt_len, _part(tables, groups), _part(final, groups))

        self._call_pairs(key, "declared", declare)

    def stream_layers(self, key: AttemptKey, event: ev.LayersWritten | ev.LayersWithdrawn) -> None:
        """Written means on every rank that has these layers."""
        self._call_pairs(key, "layers", lambda agent, pair, groups: agent.stream_layers(key.of_pair(pair), event))

    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool, final: dict[str, int]) -> None:
        """The pairs of the sampling rank get the seeds."""

        def finish(agent: RankAgent, pair: Pair, groups: frozenset[str] | None) -> None:
            own = seeds if pair[P] == self._instance.sampling else NO_SEEDS
            agent.finish_prefill(key.of_pair(pair), own, finished, _part(final, groups))

        self._call_pairs(key, "sampled", finish)

    def announce_decode(self, ticket: SignedTicket) -> None:
        self._begin(ticket, D, ticket.prefill_addresses)

    def open_decode(
        self, ticket: SignedTicket, prompt_len: int, wanted: dict[str, Interval], pages: dict[str, list[int]]
    ) -> None:
        """Block tables are the same on all ranks. Raises `ProtocolError` for a group that no rank has."""
        if missing := sorted(wanted.keys() - self._instance.groups.keys()):
            raise ProtocolError(f"groups {missing} are on no rank")

        tables = {group: list(table) for group, table in pages.items()}

        def place(agent: RankAgent, pair: Pair, groups: frozenset[str] | None) -> None:
            agent.open_decode(ticket, prompt_len, _part(wanted, groups), _part(tables, groups), pair[P])

        if not self._passes(ticket.prefill_addresses):
            self._begin(ticket, D, ticket.prefill_addresses)
        self._call_pairs(ticket.key, "placed", place, D)

    def abort(self, key: AttemptKey, reason: str, taken: Callable[[], None] | None = None) -> None:
        """Give up a request. `taken` is called when all ranks have done so."""
        with self._lock:
            leg = self._legs.get(key)
            if leg is None:
                self._agents[self._first].abort(key, reason, taken)
                return
            # The other pairs are not open yet, and never will be.
            leg.ended = reason
            left = list(leg.pairs)

            def one_has() -> None:
                with self._lock:
                    left.pop()
                    if left or taken is None:
                        return
                taken()

            for pair in list(left):
                self._agents[pair[leg.side]].abort(key.of_pair(pair), reason, one_has)

    # ------------------------------------------------------------ pairs

    def _passes(self, others: Sequence[str]) -> bool:
        return self._instance.num_ranks == len(others) == 1

    def _lead(self, side: int) -> Pair:
        return (self._first, 0) if side == P else (0, self._first)

    def _begin(self, ticket: SignedTicket, side: int, others: Sequence[str]) -> None:
        with self._lock:
            if self._passes(others):
                self._open(ticket, side, LEAD)
            elif ticket.key not in self._legs and ticket.key not in self._ended:
                lead = self._lead(side)
                leg = self._legs[ticket.key] = _Leg(ticket, side, lead, {lead: None})
                self._open(ticket, side, lead)
                self._open_pairs(leg, self._peers.get(ticket.key.ends[1 - side][0]))

    def _open(self, ticket: SignedTicket, side: int, pair: Pair) -> None:
        if side == P:
            self._agents[pair[P]].open_prefill(ticket, pair[D])
        else:
            self._agents[pair[D]].announce_decode(ticket, pair[P])

    def _open_pairs(self, leg: _Leg, peer: Instance | None) -> None:
        ticket, here = leg.ticket, self._instance
        named = ticket.decode_addresses if leg.side == P else ticket.prefill_addresses
        if peer is None or leg.gather is not None or leg.ended or len(named) != peer.num_ranks:
            return  # a ticket that names other ranks is refused, and so is the open pair
        key = ticket.key
        try:
            here = here.only(peer.groups)  # drafters' KV may stay where it is; then the peer's is not named
            every = pairs_of(here, peer) if leg.side == P else pairs_of(peer, here)
        except IncompatiblePeerError:
            return  # the session is refused, and so is the open pair
        leg.pairs = found = {pair: groups for pair, groups in every.items() if pair[leg.side] in self._agents}
        leg.gather = PrefillGather(key, found) if leg.side == P else DecodeGather(key, found, peer.sampling)
        for pair, groups in found.items():
            if pair != leg.lead:
                self._open(leg.ticket, leg.side, pair)
            for call in leg.calls.values():
                if pair != leg.lead or leg.side == D:  # P's leading pair got the call at once
                    call(self._agents[pair[leg.side]], pair, groups)

    def _abort_unopened_pairs(self, leg: _Leg) -> None:
        """D gives up a request before it knows P's ranks. If these are apart, only one of them has a message of D, and
        the others hold pages for the request: open an attempt with each of them only to abort it."""
        for rank in range(1, len(leg.ticket.prefill_addresses)) if leg.lead == LEAD else ():
            if (pair := (rank, 0)) not in leg.pairs:
                leg.pairs = {**leg.pairs, pair: None}
                self._open(leg.ticket, D, pair)
                self._agents[0].abort(leg.ticket.key.of_pair(pair), leg.ended or "aborted")

    def _call_pairs(self, key: AttemptKey, what: str, call: PairCall, side: int = P) -> None:
        with self._lock:
            leg = self._legs.get(key)
            if leg is not None:
                leg.calls[what] = call
                # D does not know which pair gets which groups until P's HELLO names its ranks. P's leading pair takes
                # everything.
                if leg.side == P or leg.gather is not None:
                    for pair, groups in leg.pairs.items():
                        call(self._agents[pair[leg.side]], pair, groups)
                return
        call(self._agents[self._first], self._lead(side), None)

    # ------------------------------------------------------------ what the agents say, each on its thread

    def on_peer(self, key: AttemptKey, peer: Instance) -> None:
        """The HELLO of pair `key` has named the other side's ranks."""
        pair, key = key.pair, key.of_pair(LEAD)
        with self._lock:
            late = key not in self._legs
            leg = self._ended.get(key) if late else self._legs[key]
            if leg is not None and leg.side == P and leg.ended and pair not in leg.pairs:
                leg.pairs = {**leg.pairs, pair: None}
                self._open(leg.ticket, P, pair)
                self._agents[pair[P]].abort(key.of_pair(pair), leg.ended)
            if leg is None and pair == self._lead(P) and key not in self._ended:
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
                agent = self._agents[action.pair[leg.side]]
                agent.abort(key.of_pair(action.pair), action.reason, None, action.message)
                continue
            if isinstance(action, ev.DecodeFailed):
                if leg.ended:
                    continue  # the engine gave up itself: another rank told P, and P told this one
                leg.ended = action.reason
            elif isinstance(action, ev.PrefillReleased | ev.DecodeCommitted | ev.DecodeFinished | ev.DecodeReleased):
                del self._legs[key]
                if isinstance(action, ev.PrefillReleased) and action.outcome != "finished":
                    leg.ended = leg.ended or action.outcome
                for what in ("declared", "layers"):  # its pages are free, and another request may get them
                    leg.calls.pop(what, None)
                self._ended[key] = leg if leg.side == P and gather is None else None
                if len(self._ended) > MAX_ENDED:
                    del self._ended[next(iter(self._ended))]
                reported, leg.end_reported = leg.end_reported, True
                if reported:
                    continue
            self._undelivered.append(action)


def _part(found: dict[str, T], groups: frozenset[str] | None) -> dict[str, T]:
    return found if groups is None else {group: what for group, what in found.items() if group in groups}

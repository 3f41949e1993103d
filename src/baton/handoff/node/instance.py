"""What an engine calls: one agent, or the agents of all its ranks as if they were one.

An instance is its ranks. Each has an agent with its own control address and memory, and each pair of a source rank and
a destination rank that has bytes to move is an attempt of its own. The pair of ranks 0 and 0 leads: it is there before
the other side's ranks are known, and brings what their HELLO says of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan.topology import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.gather import LEAD, DecodeGather, EndPair, PrefillGather, pairs_of
from baton.handoff.protocol.messages import NO_SEEDS, AttemptKey, Pair, Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket
from baton.kv.interval import Interval

T = TypeVar("T")
MAX_PEERS = 1024
# Requests that ended with their first token before D was known: its ranks are told when they come.
MAX_LATE = 4096
Groups = Mapping[Pair, frozenset[str] | None]  # the pairs whose attempts are open; None: all groups that are declared


class Agent(Protocol):
    """The calls of `baton.handoff.node.agent.HandoffAgent` that an engine uses. From any thread; none blocks."""

    def open_prefill(self, ticket: Ticket) -> None: ...
    def admit_prefill(self, key: AttemptKey) -> None: ...
    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None: ...
    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool, final: dict[str, int]) -> None: ...
    def announce_decode(self, ticket: SignedTicket) -> None: ...
    def open_decode(
        self, ticket: SignedTicket, prompt_len: int, wanted: dict[str, Interval], pages: dict[str, list[int]]
    ) -> None: ...
    def abort(self, key: AttemptKey, reason: str, taken: Callable[[], None] | None = None) -> None: ...


class RankAgent(Agent, Protocol):
    """One rank's agent, whose attempts are with one rank `peer` of the other engine."""

    def open_prefill(self, ticket: Ticket, peer: int = 0) -> None: ...
    def announce_decode(self, ticket: SignedTicket, peer: int = 0) -> None: ...
    def open_decode(
        self,
        ticket: SignedTicket,
        prompt_len: int,
        wanted: dict[str, Interval],
        pages: dict[str, list[int]],
        peer: int = 0,
    ) -> None: ...


# What P's engine says of a request, to one agent: its key there, the pair's groups, whether that rank samples.
Saying = Callable[[RankAgent, AttemptKey, frozenset[str] | None, bool], None]


@dataclass(slots=True, eq=False)
class _Prefill:
    """P's half of one request. `said` is what the engine has said, for pairs that are opened later; `told`: the engine
    knows that its pages are free; `ended`: no pair is to be opened any more.
    """

    ticket: Ticket
    pairs: Groups = field(default_factory=lambda: {LEAD: None})
    gather: PrefillGather | None = None
    said: dict[str, Saying] = field(default_factory=dict)
    told: bool = False
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Decode:
    """D's half of one request; `placed`: the prompt's length, what is wanted, and D's block tables."""

    ticket: SignedTicket
    pairs: Groups = field(default_factory=lambda: {LEAD: None})
    gather: DecodeGather | None = None
    placed: tuple[int, dict[str, Interval], dict[str, list[int]]] | None = None
    ended: bool = False


class InstanceAgent:
    """The agents of all ranks of `instance` as one `Agent`; `bind` brings them, by rank. `on_event` is called as a
    `HandoffAgent` calls it, once per request where that calls once per pair.

    With one rank on both sides, calls and events pass through.
    """

    def __init__(self, instance: Instance, on_event: Callable[[ev.HandoffEvent], None]) -> None:
        self._instance = instance
        self._tell = on_event
        self._agents: Sequence[RankAgent] = ()
        self._prefills: dict[AttemptKey, _Prefill] = {}
        self._decodes: dict[AttemptKey, _Decode] = {}
        self._late: dict[AttemptKey, _Prefill] = {}
        self._peers: dict[str, Instance] = {}  # by incarnation
        self._lock = threading.RLock()

    def bind(self, agents: Sequence[RankAgent]) -> None:
        """Use these agents, whose events come to `on_event` and `on_peer`.

        Raises `ProtocolError` unless there is one for each rank.
        """
        if len(agents) != self._instance.num_ranks:
            raise ProtocolError(f"{len(agents)} agents for {self._instance.num_ranks} ranks")
        self._agents = agents

    def _alone(self, peers: Sequence[str]) -> bool:
        return len(self._agents) == len(peers) == 1

    # ------------------------------------------------------------ P's calls

    def open_prefill(self, ticket: Ticket) -> None:
        """As `HandoffAgent.open_prefill`."""
        with self._lock:
            if not self._alone(ticket.decode_addresses):
                leg = self._prefills[ticket.key] = _Prefill(ticket)
                self._agents[0].open_prefill(ticket)
                self._open_prefills(leg, self._peers.get(ticket.decode_incarnation))
                return
        self._agents[0].open_prefill(ticket)

    def _open_prefills(self, leg: _Prefill, peer: Instance | None) -> None:
        """Begin the attempts of the other pairs, when D's ranks are known."""
        if peer is None or leg.gather is not None or leg.ended:
            return
        try:
            leg.pairs = found = pairs_of(self._instance, peer)
        except IncompatiblePeerError:
            return  # the session is refused, and D tells by the pair that is open
        leg.gather = PrefillGather(leg.ticket.key, found)
        for pair in leg.pairs.keys() - {LEAD}:
            self._agents[pair[0]].open_prefill(leg.ticket, pair[1])
            for saying in leg.said.values():
                self._pass_on(leg, pair, saying)

    def admit_prefill(self, key: AttemptKey) -> None:
        """As `HandoffAgent.admit_prefill`."""
        self._say(key, "admitted", lambda agent, own, groups, samples: agent.admit_prefill(own))

    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None:
        """As `HandoffAgent.declare_final`."""
        # Those of the engine grow on.
        tables = {group: list(table) for group, table in pages.items()} if key in self._prefills else pages

        def declare(agent: RankAgent, own: AttemptKey, groups: frozenset[str] | None, samples: bool) -> None:
            agent.declare_final(own, prompt_len, _part(tables, groups), _part(final, groups))

        self._say(key, "declared", declare)

    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool, final: dict[str, int]) -> None:
        """As `HandoffAgent.finish_prefill`; the seeds go with the pairs of the rank that samples."""

        def finish(agent: RankAgent, own: AttemptKey, groups: frozenset[str] | None, samples: bool) -> None:
            agent.finish_prefill(own, seeds if samples else NO_SEEDS, finished, _part(final, groups))

        self._say(key, "sampled", finish)

    def _say(self, key: AttemptKey, what: str, saying: Saying) -> None:
        with self._lock:
            leg = self._prefills.get(key)
            if leg is not None:
                leg.said[what] = saying
                for pair in leg.pairs:
                    self._pass_on(leg, pair, saying)
                return
        saying(self._agents[0], key, None, True)

    def _pass_on(self, leg: _Prefill, pair: Pair, saying: Saying) -> None:
        samples = pair[0] == self._instance.sampling
        saying(self._agents[pair[0]], leg.ticket.key.of_pair(pair), leg.pairs[pair], samples)

    # ------------------------------------------------------------ D's calls

    def announce_decode(self, ticket: SignedTicket) -> None:
        """As `HandoffAgent.announce_decode`."""
        with self._lock:
            if not self._alone(ticket.prefill_addresses):
                if ticket.key not in self._decodes:
                    leg = self._decodes[ticket.key] = _Decode(ticket)
                    self._agents[0].announce_decode(ticket)
                    self._open_decodes(leg, self._peers.get(ticket.prefill_incarnation))
                return
        self._agents[0].announce_decode(ticket)

    def open_decode(
        self, ticket: SignedTicket, prompt_len: int, wanted: dict[str, Interval], pages: dict[str, list[int]]
    ) -> None:
        """As `HandoffAgent.open_decode`. Raises `ProtocolError` also for a group that no rank has."""
        if missing := sorted(wanted.keys() - self._instance.groups.keys()):
            raise ProtocolError(f"groups {missing} are on no rank")
        with self._lock:
            if not self._alone(ticket.prefill_addresses):
                leg = self._decodes.get(ticket.key)
                if leg is None:
                    # Which ranks bring what is known when P has answered.
                    self.announce_decode(ticket)
                    leg = self._decodes[ticket.key]
                tables = {group: list(table) for group, table in pages.items()}
                leg.placed = (prompt_len, dict(wanted), tables)
                if leg.gather is not None:
                    self._place(leg)
                return
        self._agents[0].open_decode(ticket, prompt_len, wanted, pages)

    def _open_decodes(self, leg: _Decode, peer: Instance | None) -> None:
        """Begin the attempts of the other pairs, when P's ranks are known."""
        if peer is None or leg.gather is not None or leg.ended:
            return
        try:
            leg.pairs = found = pairs_of(peer, self._instance)
        except IncompatiblePeerError:
            return  # the session is refused, and with it the pair that is open
        leg.gather = DecodeGather(leg.ticket.key, found, peer.sampling)
        for source, dest in leg.pairs.keys() - {LEAD}:
            self._agents[dest].announce_decode(leg.ticket, source)
        if leg.placed is not None:
            self._place(leg)

    def _place(self, leg: _Decode) -> None:
        assert leg.placed is not None
        prompt_len, wanted, pages = leg.placed
        for pair, groups in leg.pairs.items():
            agent, tables = self._agents[pair[1]], _part(pages, groups)
            agent.open_decode(leg.ticket, prompt_len, _part(wanted, groups), tables, pair[0])

    def abort(self, key: AttemptKey, reason: str, taken: Callable[[], None] | None = None) -> None:
        """As `HandoffAgent.abort`: `taken` is called when all ranks have taken it."""
        with self._lock:
            leg = self._prefills.get(key) or self._decodes.get(key)
            if leg is None:
                self._agents[0].abort(key, reason, taken)
                return
            # Nothing has begun of the pairs that are not open yet, and nothing will.
            leg.ended = True
            side = 0 if isinstance(leg, _Prefill) else 1
            left = list(leg.pairs)

            def one_has() -> None:
                with self._lock:
                    left.pop()
                    if left or taken is None:
                        return
                taken()

            for pair in list(left):
                self._agents[pair[side]].abort(key.of_pair(pair), reason, one_has)

    # ------------------------------------------------------------ what the agents say, each on its thread

    def on_peer(self, key: AttemptKey, peer: Instance) -> None:
        """The other side of a request has said what its ranks are."""
        with self._lock:
            if (decode := self._decodes.get(key)) is not None:
                self._keep(key.prefill_incarnation, peer)
                self._open_decodes(decode, peer)
            elif (prefill := self._prefills.get(key)) is not None:
                self._keep(key.decode_incarnation, peer)
                self._open_prefills(prefill, peer)
            elif (prefill := self._late.pop(key, None)) is not None:
                self._prefills[key] = prefill
                self._open_prefills(prefill, peer)
                self._prefill_event(prefill, LEAD, ev.PrefillReleased(key, "finished"))

    def _keep(self, incarnation: str, peer: Instance) -> None:
        self._peers[incarnation] = peer
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def on_event(self, event: ev.HandoffEvent) -> None:
        """An event of one pair."""
        with self._lock:
            key, pair = event.key.of_pair(LEAD), event.key.pair
            if (prefill := self._prefills.get(key)) is not None and isinstance(event, ev.PrefillReleased):
                self._prefill_event(prefill, pair, event)
                return
            if (decode := self._decodes.get(key)) is not None:
                self._decode_event(decode, pair, event)
                return
        if pair == LEAD:
            self._tell(event)

    def _prefill_event(self, leg: _Prefill, pair: Pair, event: ev.PrefillReleased) -> None:
        key = leg.ticket.key
        out = [event] if leg.gather is None else leg.gather.handle(pair, event)
        for action in out:
            if isinstance(action, EndPair):
                self._agents[action.pair[0]].abort(key.of_pair(action.pair), action.reason)
                continue
            del self._prefills[key]
            told, leg.told = leg.told, True
            if leg.gather is None and event.outcome == "finished" and not told:
                self._late[key] = leg
                if len(self._late) > MAX_LATE:
                    del self._late[next(iter(self._late))]
            if not told:
                self._tell(action)

    def _decode_event(self, leg: _Decode, pair: Pair, event: ev.HandoffEvent) -> None:
        key = leg.ticket.key
        for action in [event] if leg.gather is None else leg.gather.handle(pair, event):
            if isinstance(action, EndPair):
                self._agents[action.pair[1]].abort(key.of_pair(action.pair), action.reason)
                continue
            if isinstance(action, ev.DecodeFailed):
                if leg.ended:
                    continue  # the engine has given up, of which P has told another rank before this one heard of it
                leg.ended = True
            if isinstance(action, ev.DecodeCommitted | ev.DecodeFinished | ev.DecodeReleased):
                del self._decodes[key]
            self._tell(action)


def _part(found: dict[str, T], groups: frozenset[str] | None) -> dict[str, T]:
    return found if groups is None else {group: what for group, what in found.items() if group in groups}

"""Engines whose ranks are apart: each process has one rank's agent, and gets events only of that rank's pairs."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton.errors import ProtocolError
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan.topology import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.gather import pairs_of
from testkit.handoffs.ranks import Engine, Rank, Shape, hand_over, settle, ticket_for, wanted_of
from testkit.inside import legs_of
from testkit.waiting import eventually


class ShapeApart(Shape):
    def instance(self, rank: int) -> Instance:
        return msgspec.structs.replace(super().instance(rank), apart=True)


class Workers:
    """Models an engine with ranks in processes: sends every call to each rank, and waits for all."""

    def __init__(self, shape: Shape, tell: Any) -> None:
        self.events: list[list[ev.HandoffEvent]] = [[] for _ in range(shape.num_ranks)]
        self.tell = tell
        self.ranks = [InstanceAgent(shape.instance(rank), self._note(rank)) for rank in range(shape.num_ranks)]

    def _note(self, rank: int) -> Any:
        def note(event: ev.HandoffEvent) -> None:
            if isinstance(event, ev.DecodeProgress):
                return
            self.events[rank].append(event)
            said = [[type(each) for each in events] for events in self.events]
            kinds = [sum(kinds.count(type(event)) for kinds in said)]
            if kinds == [len(self.ranks)] or isinstance(event, ev.DecodeFailed):
                self.tell(event)

        return note

    @property
    def _legs(self) -> dict[Any, Any]:
        return {key: leg for rank in self.ranks for key, leg in legs_of(rank).items()}

    def next_request(self) -> None:
        """Forget the events of earlier requests."""
        for events in self.events:
            events.clear()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            for rank in self.ranks:
                groups = rank.instance.own
                own = [
                    {group: what for group, what in arg.items() if group in groups} if isinstance(arg, dict) else arg
                    for arg in args
                ]
                getattr(rank, name)(*own)

        return call


class Apart(Engine):
    """As `Engine`, with ranks in separate processes if its shape says so."""

    def __post_init__(self) -> None:
        if not isinstance(self.shape, ShapeApart):
            super().__post_init__()
            return
        self.events, self.progress = queue.Queue(), []
        workers: Any = Workers(self.shape, self.note)
        self.together, self.ranks = workers, []
        for rank, agent in enumerate(workers.ranks):
            told = agent.on_event, agent.on_peer
            self.ranks.append(Rank(self.name, self.shape, rank, self.schemes[0], *told, **self.config))
            agent.bind([self.ranks[-1].agent])
        self.addresses = [rank.agent.address for rank in self.ranks]


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(name: str, shape: Shape, **config: object) -> Engine:
        made.append(Apart(name, shape, config=config))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


ONE, TWO, FOUR, STAGES = ShapeApart(), ShapeApart(tp=2), ShapeApart(tp=4), ShapeApart(stages=(0, 1))


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    ("p_shape", "d_shape"),
    [
        (TWO, TWO),
        (TWO, ShapeApart(tp=1, page_size=5)),
        (Shape(), TWO),
        (TWO, FOUR),
        (FOUR, Shape(tp=2)),
        (STAGES, ONE),
        (ONE, STAGES),
        (ShapeApart(tp=2, stages=(0, 2)), ShapeApart(stages=(0, 1, 3))),
    ],
)
def test_every_byte_of_every_rank_arrives(engines: Any, p_shape: Shape, d_shape: Shape, mode: str) -> None:
    """Latents, of which some ranks send nothing; a drafter that not all stages have."""
    p, d = engines("P", p_shape), engines("D", d_shape)
    for salt, announced in enumerate([True, False, True]):
        hand_over(p, d, mode, n=13 - salt, hit=salt, announced=announced, salt=salt)
        for engine in (p, d):
            if isinstance(engine.together, Workers):
                engine.together.next_request()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("when", ["before", "between", "announced"])
def test_no_rank_of_d_waits_for_a_handoff_that_p_aborted(engines: Any, when: str, known: bool) -> None:
    """With and without P knowing D's ranks, and before a ticket has expired."""
    p, d = engines("P", TWO), engines("D", FOUR)
    if known:
        hand_over(p, d, "push")
        p.together.next_request()
        d.together.next_request()
    ticket = ticket_for(p, d, "push")
    p.together.open_prefill(ticket)
    if when == "before":
        p.together.abort(ticket.key, "refused")
        p.next(ev.PrefillReleased)
    d.together.announce_decode(ticket)
    if when == "between":
        p.together.abort(ticket.key, "refused")
    elif when == "announced":
        p.together.admit_prefill(ticket.key)
        d.next(ev.DecodeAdmitted)
        p.together.abort(ticket.key, "refused")
    eventually(lambda: all(any(isinstance(e, ev.DecodeReleased) for e in events) for events in d.together.events))
    settle(p, d)
    for events in d.together.events:
        ends = [event for event in events if not isinstance(event, ev.DecodeAdmitted)]
        assert [type(event) for event in ends] == [ev.DecodeFailed, ev.DecodeReleased]
        assert ends[0].reason == "refused"
    for events in p.together.events:
        assert events == [ev.PrefillReleased(ticket.key, "refused")]


@pytest.mark.parametrize("how", ["abort", "incompatible"])
def test_no_rank_of_p_holds_a_handoff_that_d_aborted_early(engines: Any, how: str) -> None:
    """Each rank of P learns of it before the ticket expires, also if the engines are incompatible."""
    p, d = engines("P", TWO), engines("D", TWO, fingerprint={} if how == "abort" else {"model": "another"})
    ticket = ticket_for(p, d, "push")
    p.together.open_prefill(ticket)
    p.together.admit_prefill(ticket.key)
    d.together.announce_decode(ticket)
    if how == "abort":
        d.together.abort(ticket.key, "aborted")
    outcomes = [p.next(ev.PrefillReleased)]
    assert all(isinstance(event, ev.PrefillReleased) and event.outcome != "committed" for event in outcomes)
    settle(p, d)


def test_a_rank_that_dies_fails_on_every_rank_that_it_serves(engines: Any) -> None:
    """Ranks that it does not serve end with what they have: the engine above fails the request at the first failure."""
    p, d = engines("P", TWO), engines("D", TWO)
    ticket = ticket_for(p, d, "push")
    p.together.open_prefill(ticket)
    p.together.admit_prefill(ticket.key)
    d.together.announce_decode(ticket)
    d.next(ev.DecodeAdmitted)
    d.together.open_decode(ticket, 13, wanted_of(13, 0), d.pages(2, 13))
    p.ranks[1].agent.close()
    failed = d.next(ev.DecodeFailed)
    assert isinstance(failed, ev.DecodeFailed)
    assert failed.reason in ("peer_lost", "engine_closed")
    p.together.abort(ticket.key, "aborted")
    settle(p, d)
    assert all(isinstance(events[-1], ev.DecodeReleased) for events in d.together.events)


def test_each_rank_apart_has_a_pair_with_rank_0_of_the_other_side() -> None:
    """Each rank that is apart has a pair with rank 0 of the other side, and each of D's with the sampling rank."""
    shape = ShapeApart(tp=2, groups=("latent",))
    together = Shape(tp=2, groups=("latent",))
    bytes_of = {"latent"}
    assert pairs_of(together.instance(0), together.instance(0)) == {(0, 0): bytes_of, (1, 1): bytes_of}
    assert pairs_of(shape.instance(0), shape.instance(0)) == {
        (0, 0): bytes_of,
        (0, 1): set(),
        (1, 0): set(),
        (1, 1): bytes_of,
    }
    one = Shape(groups=("latent",))
    # P's second rank sends no latents to the one rank of D, but still gets its messages.
    assert pairs_of(together.instance(0), one.instance(0)) == {(0, 0): bytes_of}
    assert pairs_of(shape.instance(0), one.instance(0)) == {(0, 0): bytes_of, (1, 0): set()}
    stages = ShapeApart(stages=(0, 2), groups=("latent",))
    assert stages.sampling == 1
    assert pairs_of(stages.instance(0), shape.instance(0)).keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_one_agent_for_a_rank_that_is_apart() -> None:
    agent = InstanceAgent(TWO.instance(1), print)
    with pytest.raises(ProtocolError, match="2 agents for 1 ranks"):
        agent.bind([object(), object()])  # type: ignore[list-item]

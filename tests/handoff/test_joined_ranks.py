"""Two instances of many ranks over a hostile network and modelled memory, with seeded random schedules.

The state machines and the code that joins them are real. Each rank gets its engine's calls, and each pair of ranks its
peer's messages, at its own time. Messages are lost, duplicated and reordered; either engine aborts at any moment.
Always: no copy touches memory that a rank's engine was told is free, a commit means that every share of every token is
in place, and each engine gets exactly one end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.handoff.agent import instance as joined
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.leg_events import Agent, DecodeLeg, DecodePages, GiveUp, LegEvent, PrefillLeg
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.gather import LEAD, DecodeGather, EndPair, Pair, PrefillGather, pairs_of
from baton.handoff.protocol.messages import AttemptKey, AttemptMessage, Register, Seeds
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.protocol.ticket import SignedTicket
from baton.kv.interval import Interval
from testkit.handoffs.ranks import Shape
from testkit.inside import legs_of, peers_of

Mode = Literal["push", "pull"]
SEEDS = Seeds(7, None, [8])
SHAPES = [
    (Shape(), Shape(tp=2)),
    (Shape(tp=2), Shape()),
    (Shape(tp=2), Shape(tp=2)),
    (Shape(tp=4), Shape(tp=2)),
    (Shape(stages=(0, 1)), Shape(stages=(0, 3))),
    (Shape(tp=2, stages=(0, 2)), Shape()),
]


class RunningMachine:
    """One state machine, its incoming messages, and its copies in progress."""

    def __init__(self, machine: PrefillHandoff | DecodeHandoff) -> None:
        self.machine = machine
        self.inbox: list[AttemptMessage] = []
        self.copies: dict[int, tuple[ev.StartCopy, list[int]]] = {}


class RankOf(Agent):
    """One rank's agent: it executes its calls later, in order."""

    def __init__(self, world: World, side: int, rank: int) -> None:
        self.world, self.side, self.rank = world, side, rank
        self.calls: list[Callable[[], None]] = []

    def post(self, key: AttemptKey, event: LegEvent) -> None:
        world, pair = self.world, key.pair
        match event:
            case PrefillLeg():
                self.calls.append(lambda: world.open_p(pair))
            case DecodeLeg():
                self.calls.append(lambda: world.open_d(pair))
            case DecodePages(_, _, wanted, pages):
                self.calls.append(lambda: world.feed(1, pair, ev.Placed(wanted, pages)))
            case GiveUp(reason, _, taken):
                self.calls.append(lambda: world.feed(self.side, pair, ev.Abort(reason)))
                if taken is not None:
                    self.calls.append(taken)
            case _:
                self.calls.append(lambda: world.feed(self.side, pair, event))


class World:
    """One request. `faults` is the chance that a message is lost or duplicated."""

    def __init__(self, seed: int, shapes: tuple[Shape, Shape], mode: Mode, faults: float, aborts: bool) -> None:
        self.random = random.Random(seed)
        self.mode, self.faults, self.aborts = mode, faults, aborts
        self.n = self.random.randint(1, 6)
        p_shape, d_shape = shapes
        self.instances = p_shape.instance(0), d_shape.instance(0)
        self.truth = pairs_of(*self.instances)
        self.wanted = {group: Interval(0, self.n) for group in self.instances[1].groups}
        self.tables = {group: [1] for group in self.wanted}
        self.ticket = SignedTicket(
            transfer_id=bytes(16),
            prefill_engine="P",
            prefill_incarnation="p",
            prefill_addresses=["tcp://p"] * p_shape.num_ranks,
            decode_engine="D",
            decode_incarnation="d",
            decode_addresses=["tcp://d"] * d_shape.num_ranks,
            mode=mode,
            prefill_expiry=1.0,
            decode_expiry=1.0,
            request_digest=bytes(32),
            text="t",
        )
        self.sides = [InstanceAgent(found, self.told(side)) for side, found in enumerate(self.instances)]
        self.ranks = [
            [RankOf(self, side, rank) for rank in range(shape.num_ranks)] for side, shape in enumerate(shapes)
        ]
        for number, (side, agents) in enumerate(zip(self.sides, self.ranks, strict=True)):
            side.bind(agents)
            if self.random.random() < 0.3:
                # It knows the other engine from an earlier handoff.
                peers_of(side)[self.ticket.key.ends[1 - number][0]] = self.instances[1 - number]
        self.machines: tuple[dict[Pair, RunningMachine], dict[Pair, RunningMachine]] = ({}, {})
        self.ready: set[Pair] = set()
        self.final = dict.fromkeys(self.wanted, 0)  # what P's engine has computed, on all ranks
        self.arrived: set[tuple[Pair, str, int]] = set()
        self.free = [False, False]
        self.events: list[list[ev.HandoffEvent]] = [[], []]
        self.p_at, self.d_at = 0, 0
        self.gave_up = False
        self.finished = self.random.random() < 0.15

    # ------------------------------------------------------------ state machines

    def open_p(self, pair: Pair) -> None:
        self.p_machine(pair)
        self.feed(0, pair, ev.Opened())

    def p_machine(self, pair: Pair) -> RunningMachine:
        if pair not in self.machines[0]:
            machine = PrefillHandoff(self.ticket.key.of_pair(pair), self.mode, "t", list(self.wanted))
            self.machines[0][pair] = RunningMachine(machine)
        return self.machines[0][pair]

    def open_d(self, pair: Pair) -> None:
        # An engine that aborts before it knows the other side tells each of its ranks.
        assert pair == LEAD or pair in self.truth or self.gave_up
        self.machines[1][pair] = RunningMachine(DecodeHandoff(self.ticket.key.of_pair(pair), self.mode, "t"))

    def feed(self, side: int, pair: Pair, event: ev.MachineEvent) -> None:
        running = self.machines[side].get(pair)
        if running is None:
            return
        for action in running.machine.handle(event):
            match action:
                case ev.Send(message):
                    other = self.p_machine(pair) if side else self.machines[1][pair]
                    other.inbox.append(message)
                case ev.StartCopy(copy_id, group, tokens):
                    assert group in self.truth.get(pair, ()), "a pair moves what is not its own"
                    running.copies[copy_id] = (action, list(range(tokens.start, tokens.stop)))
                case ev.CancelCopies(copy_ids):
                    for copy_id in copy_ids:
                        if copy_id in running.copies and self.random.random() < 0.5:
                            del running.copies[copy_id]
                            self.feed(side, pair, ev.CopyEnded(copy_id, ok=False))
                case ev.Notify(found):
                    self.sides[side].on_event(found)

    def hear(self, side: int, pair: Pair, lossy: bool) -> None:
        running = self.machines[side][pair]
        message = running.inbox.pop(self.random.randrange(len(running.inbox)))
        if lossy and self.random.random() < self.faults:
            if self.random.random() < 0.5:
                return
            running.inbox.append(message)
        if side == 0:
            assert isinstance(running.machine, PrefillHandoff)
            if pair == LEAD:
                self.sides[0].on_peer(self.ticket.key, self.instances[1])
            if isinstance(message, Register) and not running.machine.registered:
                running.machine.groups = self.truth.get(pair, frozenset())
        self.feed(side, pair, ev.Received(message))

    def meet(self, pair: Pair) -> None:
        self.ready.add(pair)
        if pair == LEAD:
            self.sides[1].on_peer(self.ticket.key, self.instances[0])
        self.feed(1, pair, ev.PeerReady())

    def move(self, side: int, pair: Pair, copy_id: int) -> None:
        copy, left = self.machines[side][pair].copies[copy_id]
        assert not self.free[1], "a copy writes a page that is free"
        assert not self.free[0], "a copy reads a page that is free"
        if left:
            token = left.pop(self.random.randrange(len(left)))
            assert token < self.final[copy.group], "a copy takes what is not final"
            self.arrived.add((pair, copy.group, token))
            return
        del self.machines[side][pair].copies[copy_id]
        self.feed(side, pair, ev.CopyEnded(copy_id, ok=True, num_bytes=1, num_runs=1))

    # ------------------------------------------------------------ engines

    def told(self, side: int) -> Callable[[ev.HandoffEvent], None]:
        def note(event: ev.HandoffEvent) -> None:
            self.events[side].append(event)
            assert event.key == self.ticket.key
            if isinstance(event, ev.PrefillReleased | ev.DecodeReleased | ev.DecodeFinished | ev.DecodeCommitted):
                assert not self.free[side]
                self.free[side] = True
            if isinstance(event, ev.PrefillReleased):
                busy = [pair for pair, running in self.machines[0].items() if running.copies]
                assert not busy, "pages are free while a pair copies"
            if isinstance(event, ev.DecodeCommitted):
                missing = [
                    (pair, group, token)
                    for pair, groups in self.truth.items()
                    for group in groups
                    for token in range(self.n)
                    if (pair, group, token) not in self.arrived
                ]
                assert not missing, "a commit without one rank"
            if isinstance(event, ev.DecodeCommitted | ev.DecodeFinished):
                assert event.seeds == SEEDS, "seeds of a rank that does not sample"

        return note

    def p_step(self) -> None:
        p, key = self.sides[0], self.ticket.key
        step, self.p_at = self.p_at, self.p_at + 1
        if step == 0:
            p.open_prefill(self.ticket)
            p.admit_prefill(key)
        elif self.free[0] or step > self.n + 1:
            return
        elif step <= self.n:
            self.final = {group: step - (group == "draft") for group in self.wanted}
            p.declare_final(key, self.n, self.tables, dict(self.final))
        else:
            self.final = dict.fromkeys(self.wanted, self.n)
            p.finish_prefill(key, SEEDS, self.finished, dict(self.final))

    def d_step(self) -> None:
        d, heard = self.sides[1], self.events[1]
        if self.d_at == 0:
            self.d_at = self.random.choice([1, 2])
            if self.d_at == 1:
                d.announce_decode(self.ticket)
            else:
                d.open_decode(self.ticket, self.n, self.wanted, self.tables)
        elif self.d_at == 1 and any(isinstance(event, ev.DecodeAdmitted) for event in heard):
            self.d_at = 2
            if not any(isinstance(event, ev.DecodeFailed) for event in heard) and not (self.free[1] or self.gave_up):
                d.open_decode(self.ticket, self.n, self.wanted, self.tables)

    # ------------------------------------------------------------ schedules

    def choices(self, lossy: bool) -> list[Callable[[], None]]:
        out: list[Callable[[], None]] = [self.p_step, self.d_step, self.tick]
        for ranks in self.ranks:
            out += [lambda rank=rank: rank.calls.pop(0)() for rank in ranks if rank.calls] * 2  # type: ignore[misc]
        for side in (0, 1):
            for pair, running in self.machines[side].items():
                if running.inbox:
                    out.append(lambda side=side, pair=pair: self.hear(side, pair, lossy))  # type: ignore[misc]
                out += [lambda s=side, p=pair, c=copy: self.move(s, p, c) for copy in running.copies]  # type: ignore[misc]
        return out + [lambda pair=pair: self.meet(pair) for pair in self.machines[1] if pair not in self.ready]  # type: ignore[misc]

    def tick(self) -> None:
        for side in (0, 1):
            for pair in list(self.machines[side]):
                self.feed(side, pair, ev.Tick())

    def run(self) -> None:
        for _ in range(self.random.randint(20, 60 * len(self.truth))):
            if self.aborts and self.d_at and self.p_at and self.random.random() < 0.02:
                self.gave_up = True
                self.random.choice(self.sides).abort(self.ticket.key, "aborted")
            self.random.choice(self.choices(lossy=True))()
        for _ in range(2):
            for _ in range(250 * len(self.truth)):
                self.random.choice(self.choices(lossy=False))()
            for side in (0, 1):
                for pair in list(self.machines[side]):
                    self.feed(side, pair, ev.Deadline())
        for _ in range(250 * len(self.truth)):
            self.random.choice(self.choices(lossy=False))()

    def check_end(self) -> None:
        for side, ends in ((0, ev.PrefillReleased), (1, ev.DecodeCommitted | ev.DecodeFinished | ev.DecodeReleased)):
            told = self.events[side]
            assert sum(isinstance(event, ends) for event in told) == 1, told
            assert sum(isinstance(event, ev.DecodeFailed) for event in told) <= 1
            assert not any(running.copies for running in self.machines[side].values())
            assert not legs_of(self.sides[side])
        if any(isinstance(event, ev.DecodeFailed) for event in self.events[1]):
            assert isinstance(self.events[1][-1], ev.DecodeReleased)


schedules = given(
    st.integers(0, 2**32),
    st.sampled_from(SHAPES),
    st.sampled_from(["push", "pull"]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@schedules
def test_ranks_agree_under_random_schedules(
    seed: int, shapes: tuple[Shape, Shape], mode: Mode, faults: float, aborts: bool
) -> None:
    world = World(seed, shapes, mode, faults, aborts)
    world.run()
    world.check_end()
    if not world.gave_up:
        outcome = "finished" if world.finished else "committed"
        assert world.events[0][-1] == ev.PrefillReleased(world.ticket.key, outcome)


class WithoutOneRank(DecodeGather):
    def _end(self, pair: Pair, event: ev.HandoffEvent) -> list[ev.HandoffEvent | EndPair]:
        if isinstance(event, ev.DecodeCommitted) and len(self._ended) == len(self._pairs) - 2:
            self._ended = dict.fromkeys(self._pairs, event)
            return [ev.DecodeCommitted(self._key, SEEDS, 0, 0)]
        return super()._end(pair, event)


class AnySeeds(DecodeGather):
    def _end(self, pair: Pair, event: ev.HandoffEvent) -> list[ev.HandoffEvent | EndPair]:
        self._sampling = pair[0]
        return super()._end(pair, event)


class Hasty(PrefillGather):
    def handle(self, pair: Pair, event: ev.PrefillReleased) -> list[ev.PrefillReleased | EndPair]:
        super().handle(pair, event)
        return [ev.PrefillReleased(self._key, event.outcome)]


@pytest.mark.parametrize(
    ("name", "mutation", "why"),
    [
        ("DecodeGather", WithoutOneRank, "a commit without one rank"),
        ("DecodeGather", AnySeeds, "seeds of a rank"),
        ("PrefillGather", Hasty, "a page that is free|while a pair copies"),
    ],
)
def test_a_broken_gather_is_found(monkeypatch: pytest.MonkeyPatch, name: str, mutation: type, why: str) -> None:
    monkeypatch.setattr(joined, name, mutation)
    for seed in range(150):
        world = World(seed, SHAPES[1 + seed % (len(SHAPES) - 1)], "push", 0.2, aborts=name == "PrefillGather")
        try:
            world.run()
        except AssertionError as error:
            if re.search(why, str(error)):
                return
        except KeyError:
            pass
    raise AssertionError(f"{mutation.__name__} was not seen")

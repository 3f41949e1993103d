"""Both state machines over a hostile network and modelled memory, with seeded random schedules.

Messages are delayed, reordered, dropped and duplicated. Copies proceed token by token, may fail, and may write wrong
values, which only digests detect. Digest checks take time. Either engine aborts at any moment. Always: no copy touches
a freed page, a commit means that every wanted token has its final value, and in the end everything was freed exactly
once.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.events import (
    Abort,
    Action,
    BadPiece,
    CancelCopies,
    CheckDigests,
    ComputeDigests,
    CopyEnded,
    Deadline,
    Declared,
    DecodeAdmitted,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeProgress,
    DecodeReleased,
    DigestsChecked,
    DigestsComputed,
    HandoffEvent,
    MachineEvent,
    Notify,
    Opened,
    PagesGiven,
    PeerLost,
    PeerReady,
    Placed,
    PrefillReleased,
    Received,
    Sampled,
    Send,
    StartCopy,
    Tick,
)
from baton.handoff.protocol.messages import AttemptKey, AttemptMessage, PieceDigest, Seeds
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.kv.interval import Interval
from baton.wire import Integrity

KEY = AttemptKey(b"0" * 16, 0, "p", "d")
SEEDS = Seeds(7, None, [8])
GROUPS = ("draft", "target")


class World:
    """One attempt. `faults` is the chance that a message is lost or duplicated, or that a copy fails; with
    `corruption`, also that a copied token is wrong.
    """

    def __init__(
        self,
        seed: int,
        mode: Literal["push", "pull"],
        faults: float,
        aborts: bool,
        corruption: bool = False,
        integrity: Integrity = "off",
    ) -> None:
        self.random = random.Random(seed)
        self.faults, self.aborts = faults, aborts
        self.mode = mode
        self.corruption = corruption
        self.n = self.random.randint(1, 9)
        self.p_size, self.d_size = self.random.randint(1, 4), self.random.randint(1, 4)
        hit = self.random.randint(0, self.n)
        self.wanted = {"target": Interval(hit, self.n), "draft": Interval(min(hit, self.n - 1), self.n)}
        self.p_pages = {g: self.shuffled(self.p_size) for g in GROUPS}
        self.d_pages = {g: self.shuffled(self.d_size) for g in GROUPS}
        self.p_memory: dict[tuple[str, int, int], int] = {}
        self.d_memory: dict[tuple[str, int, int], int] = {}
        self.p_free = self.d_free = False
        self.p = PrefillHandoff(KEY, mode, "t", GROUPS, integrity=integrity)
        self.announces = self.random.random() < 0.5
        self.places = False
        given = (None, None) if self.announces else (self.wanted, self.d_pages)
        self.d = DecodeHandoff(KEY, mode, "t", *given, integrity=integrity)
        self.proven: dict[str, int] = {}
        self.checks: list[CheckDigests] = []
        self.to_p: list[AttemptMessage] = []
        self.to_d: list[AttemptMessage] = []
        self.copies: dict[int, tuple[StartCopy, list[int]]] = {}
        self.events: list[HandoffEvent] = []
        self.step_of_p = 0
        self.peer_ready = False
        self.finished = self.random.random() < 0.15

    def shuffled(self, size: int) -> list[int]:
        pages = list(range(1, 1 - (-self.n // size)))
        self.random.shuffle(pages)
        return pages

    # ------------------------------------------------------------ engines and network

    def feed_p(self, event: MachineEvent) -> None:
        self.carry_out(self.p.handle(event), self.to_d)

    def feed_d(self, event: MachineEvent) -> None:
        self.carry_out(self.d.handle(event), self.to_p)

    def carry_out(self, actions: list[Action], out: list[AttemptMessage]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    out.append(message)
                case StartCopy(copy_id, _, tokens):
                    assert copy_id not in self.copies
                    self.copies[copy_id] = (action, list(range(tokens.start, tokens.stop)))
                case CancelCopies(copy_ids):
                    for copy_id in copy_ids:
                        if copy_id in self.copies and self.random.random() < 0.5:
                            self.end_copy(copy_id, ok=False)
                case ComputeDigests(group, parts, pages):
                    found = [self.digest(group, part, pages, self.p_memory, self.p_size) for part in parts]
                    self.feed_p(DigestsComputed(group, found))
                case CheckDigests():
                    self.checks.append(action)
                case Notify(event):
                    self.note(event)

    def digest(
        self, group: str, tokens: Interval, pages: list[int], memory: dict[tuple[str, int, int], int], size: int
    ) -> PieceDigest:
        values = [memory.get((group, pages[t // size], t % size)) for t in range(tokens.start, tokens.stop)]
        return PieceDigest(tokens, xxhash.xxh3_64_digest(repr((group, tokens, values)).encode()))

    def check(self) -> None:
        """One digest check ends; it reports the current contents."""
        action = self.checks.pop(self.random.randrange(len(self.checks)))
        bad = [
            BadPiece(group, piece.tokens, ((0, "k"),))
            for group, pieces in action.digests.items()
            for piece in pieces
            if piece != self.digest(group, piece.tokens, action.pages[group], self.d_memory, self.d_size)
        ]
        self.feed_d(DigestsChecked(action.check_id, tuple(bad)))

    def holds(self, ends: dict[str, int]) -> None:
        for group, end in ends.items():
            for t in range(self.wanted[group].start, end):
                page = self.d_pages[group][t // self.d_size]
                assert self.d_memory[group, page, t % self.d_size] == t, (group, t)

    def note(self, event: HandoffEvent) -> None:
        self.events.append(event)
        match event:
            case DecodeAdmitted():
                assert self.announces
                assert not self.places
                self.places = True
            case PrefillReleased():
                assert not self.p_free
                self.p_free = True
                if self.mode == "push":
                    assert not self.copies
            case DecodeProgress(_, proven):
                assert all(proven.get(group, 0) >= end for group, end in self.proven.items())
                self.proven = proven
                self.holds(proven)
            case DecodeReleased() | DecodeFinished():
                assert not self.d_free
                self.d_free = True
                if isinstance(event, DecodeReleased):
                    self.holds(self.proven)
            case DecodeCommitted():
                assert not self.d_free
                assert not self.copies
                self.d_free = True  # the engine's own pages: no copy may write them any more
                self.holds({group: tokens.stop for group, tokens in self.wanted.items()})

    def p_step(self) -> None:
        """The next step of P's prefill, of one token; the drafter's last entry comes with the seeds."""
        step, self.step_of_p = self.step_of_p, self.step_of_p + 1
        if step == 0:
            self.feed_p(Opened())
            self.feed_p(PagesGiven())
        elif self.p_free:
            return  # the engine was told to drop the request
        elif step <= self.n:
            self.write("target", step - 1)
            if step >= 2:
                self.write("draft", step - 2)
            self.feed_p(Declared(self.n, self.p_pages, {"target": step, "draft": step - 1}))
        elif step == self.n + 1:
            self.write("draft", self.n - 1)
            self.feed_p(Sampled(SEEDS, self.finished, dict.fromkeys(GROUPS, self.n)))

    def write(self, group: str, t: int) -> None:
        self.p_memory[group, self.p_pages[group][t // self.p_size], t % self.p_size] = t

    # ------------------------------------------------------------ copies

    def move(self, copy_id: int) -> None:
        copy, left = self.copies[copy_id]
        if not left:
            self.end_copy(copy_id, ok=True)
            return
        assert not self.d_free, "a copy writes a page that was freed"
        if self.mode == "pull":
            assert not self.p_free, "a copy reads a page that was freed"
        t = left.pop(self.random.randrange(len(left)))
        value = self.p_memory[copy.group, copy.source_pages[t // self.p_size], t % self.p_size]
        if self.corruption and self.random.random() < 0.1:
            value = -1
        self.d_memory[copy.group, copy.dest_pages[t // self.d_size], t % self.d_size] = value

    def end_copy(self, copy_id: int, ok: bool) -> None:
        copy, _ = self.copies.pop(copy_id)
        end = CopyEnded(copy.copy_id, ok, num_bytes=1, num_runs=1)
        (self.feed_p if self.mode == "push" else self.feed_d)(end)

    # ------------------------------------------------------------ schedules

    def deliver(self, queue: list[AttemptMessage], lossy: bool) -> None:
        message = queue.pop(self.random.randrange(len(queue)))
        if lossy and self.random.random() < self.faults:
            if self.random.random() < 0.5:
                return
            queue.append(message)
        (self.feed_p if queue is self.to_p else self.feed_d)(Received(message))

    def choices(self) -> list[str]:
        out = ["p_step"] * 2 + ["tick"]
        out += ["to_p"] * 3 * bool(self.to_p) + ["to_d"] * 3 * bool(self.to_d) + ["copy"] * 4 * bool(self.copies)
        out += ["place"] * self.places
        return out + ["ready"] * (not self.peer_ready) + ["check"] * 2 * bool(self.checks)

    def run(self) -> None:
        for _ in range(self.random.randint(5, 120)):
            if self.aborts and self.random.random() < 0.03:
                event: MachineEvent = self.random.choice([Abort("gone"), Deadline()])
                self.random.choice([self.feed_p, self.feed_d])(event)
            self.step(self.random.choice(self.choices()), lossy=True)
        for event_of_the_end in (None, Deadline()):
            if event_of_the_end is not None:
                # A machine that was never joined ends when its ticket expires.
                self.feed_p(event_of_the_end)
                self.feed_d(event_of_the_end)
            for _ in range(600):
                self.step(self.random.choice(self.choices()), lossy=False)

    def step(self, name: str, lossy: bool) -> None:
        match name:
            case "p_step":
                self.p_step()
            case "tick":
                self.feed_p(Tick())
                self.feed_d(Tick())
            case "to_p":
                self.deliver(self.to_p, lossy)
            case "to_d":
                self.deliver(self.to_d, lossy)
            case "copy":
                copy_id = self.random.choice(list(self.copies))
                if lossy and self.random.random() < self.faults / 4:
                    self.end_copy(copy_id, ok=False)
                else:
                    self.move(copy_id)
            case "check":
                self.check()
            case "place":
                self.places = False
                self.feed_d(Placed(self.wanted, self.d_pages))
            case "ready":
                self.peer_ready = True
                self.feed_d(PeerReady())

    def check_end(self) -> None:
        assert self.p.closed
        assert self.d.closed
        assert not self.copies
        assert self.p_free
        assert self.d_free
        kinds = [type(event) for event in self.events]
        assert kinds.count(PrefillReleased) == 1
        ends = [event for event in self.events if isinstance(event, DecodeCommitted | DecodeFinished | DecodeReleased)]
        assert len(ends) == 1
        assert kinds.count(DecodeFailed) <= 1
        if kinds.count(DecodeFailed):
            assert isinstance(ends[0], DecodeReleased)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(["push", "pull"]), st.sampled_from([0.0, 0.2]), st.booleans())
def test_two_machines_agree_under_random_schedules(
    seed: int, mode: Literal["push", "pull"], faults: float, aborts: bool
) -> None:
    world = World(seed, mode, faults, aborts)
    world.run()
    world.check_end()
    if not faults and not aborts:
        outcome = "finished" if world.finished else "committed"
        assert PrefillReleased(KEY, outcome) in world.events


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(["push", "pull"]), st.sampled_from([0.0, 0.2]), st.booleans())
def test_random_schedules_with_wrong_bytes(
    seed: int, mode: Literal["push", "pull"], faults: float, aborts: bool
) -> None:
    world = World(seed, mode, faults, aborts, corruption=True, integrity="full")
    world.run()
    world.check_end()
    if not faults and not aborts:
        ends = [event.outcome for event in world.events if isinstance(event, PrefillReleased)]
        assert ends[0] in ("finished", "committed", "integrity_failed")


def test_wrong_bytes_pass_where_nobody_looks() -> None:
    def play() -> None:
        for seed in range(50):
            World(seed, "push", 0.0, False, corruption=True).run()

    with pytest.raises(AssertionError, match=r"assert -1 == \d"):
        play()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_model_sees_what_it_is_there_to_see(mode: Literal["push", "pull"]) -> None:
    """Some schedule exposes a machine that frees pages just because a deadline has passed."""
    found = Counter[str]()
    for seed in range(300):
        world = World(seed, mode, 0.0, True)
        victim = world.d if mode == "push" else world.p
        honest = victim.handle

        def hasty(event: MachineEvent, honest=honest, victim=victim) -> list[Action]:  # type: ignore[no-untyped-def]
            actions = honest(event)
            if isinstance(event, Abort | Deadline) and not victim.closed:
                actions += honest(PeerLost("peer_lost", "", fenced=True))
            return actions

        victim.handle = hasty  # type: ignore[method-assign]
        try:
            world.run()
        except (AssertionError, KeyError) as error:
            found[str(error).partition("\n")[0]] += 1
    assert found["a copy writes a page that was freed" if mode == "push" else "a copy reads a page that was freed"]

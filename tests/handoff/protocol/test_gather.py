"""One outcome from many pairs of ranks: with any order of their events, and any pairs failing."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan.topology import Instance, RankGeometry
from baton.handoff.protocol.events import (
    DecodeAdmitted,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeProgress,
    DecodeReleased,
    HandoffEvent,
    PrefillReleased,
)
from baton.handoff.protocol.gather import DecodeGather, EndPair, Pair, PrefillGather, pairs, pairs_with
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.kv.geometry import Geometry
from baton.kv.spec import GroupSpec, kv_planes, latent_planes

KEY = AttemptKey(bytes(16), 0, "p", "d")
SAMPLING = 1
GOOD = (DecodeCommitted, DecodeFinished)
ENDS = (DecodeCommitted, DecodeFinished, DecodeReleased)


def seeds(source: int) -> Seeds:
    return Seeds(first_token=100 + source)


def events_of(rng: random.Random, pair: Pair, groups: frozenset[str], end: str) -> list[HandoffEvent]:
    """A possible sequence of events from one pair's machine on D."""
    out: list[HandoffEvent] = [DecodeAdmitted(KEY)] if rng.random() < 0.9 else []
    proven: dict[str, int] = {}
    for group in sorted(groups):
        for _ in range(rng.randrange(3)):
            proven = {**proven, group: proven.get(group, 0) + rng.randrange(1, 9)}
            out.append(DecodeProgress(KEY, proven))
    if end == "committed":
        return [*out, DecodeCommitted(KEY, seeds(pair[0]), 10, 1)]
    if end == "finished":
        return [*out, DecodeFinished(KEY, seeds(pair[0]))]
    failed: list[HandoffEvent] = [DecodeFailed(KEY, "transfer_failed", "x", True)] if end == "failed" else []
    return [*out, *failed, DecodeReleased(KEY)]


class Run:
    """A gather of D, with its invariants."""

    def __init__(self, rng: random.Random, ends: Mapping[Pair, str], gather: DecodeGather | None = None) -> None:
        self.groups = {pair: frozenset(rng.sample(["target", "draft"], rng.randrange(3))) for pair in ends}
        self.gather = gather if gather is not None else DecodeGather(KEY, self.groups, SAMPLING)
        self.left = {pair: events_of(rng, pair, self.groups[pair], end) for pair, end in ends.items()}
        self.rng = rng
        self.ended: dict[Pair, HandoffEvent] = {}
        self.admitted: set[Pair] = set()
        self.proven: dict[Pair, dict[str, int]] = {}
        self.out: list[HandoffEvent] = []

    def step(self) -> None:
        pair = self.rng.choice([pair for pair, left in self.left.items() if left])
        event = self.left[pair].pop(0)
        if isinstance(event, DecodeAdmitted):
            self.admitted.add(pair)
        elif isinstance(event, DecodeProgress):
            self.proven[pair] = event.proven
        elif isinstance(event, ENDS):
            self.ended[pair] = event
        for action in self.gather.handle(pair, event):
            if isinstance(action, EndPair):
                self.end(action.pair)
            else:
                self.check(action)
                self.out.append(action)

    def end(self, pair: Pair) -> None:
        """The pair is told to abort: it fails, unless it has ended already or ends before the abort arrives."""
        assert pair not in self.ended
        if self.rng.random() < 0.7 and self.left[pair]:
            self.left[pair] = [DecodeReleased(KEY)]

    def check(self, event: HandoffEvent) -> None:
        every = self.groups.keys()
        assert not any(isinstance(before, ENDS) for before in self.out), "something comes after the outcome"
        match event:
            case DecodeAdmitted():
                assert self.admitted == every
            case DecodeProgress(_, proven):
                for group, end in proven.items():
                    carriers = [pair for pair, groups in self.groups.items() if group in groups]
                    assert all(self.proven.get(pair, {}).get(group, 0) >= end for pair in carriers), "not proven by all"
            case DecodeCommitted(_, got, num_bytes, num_runs):
                assert self.ended.keys() == every, "a rank has not committed"
                assert all(isinstance(end, DecodeCommitted) for end in self.ended.values()), "a rank has not committed"
                assert got == seeds(SAMPLING), "seeds of another rank"
                assert (num_bytes, num_runs) == (10 * len(every), len(every))
            case DecodeFinished(_, got):
                assert self.ended.keys() == every
                assert all(isinstance(end, DecodeFinished) for end in self.ended.values())
                assert got == seeds(SAMPLING), "seeds of another rank"
            case DecodeReleased():
                assert self.ended.keys() == every, "released before all pairs are quiet"
                assert len({type(end) for end in self.ended.values()}) > 1 or not isinstance(
                    next(iter(self.ended.values())), GOOD
                )

    def run(self) -> list[HandoffEvent]:
        while any(self.left.values()):
            self.step()
        kinds = [type(event) for event in self.out]
        assert sum(isinstance(event, ENDS) for event in self.out) == 1, "not one outcome"
        assert kinds.count(DecodeAdmitted) <= 1
        assert kinds.count(DecodeFailed) <= 1
        if DecodeFailed in kinds:
            assert kinds[-1] is DecodeReleased
        return self.out


@st.composite
def outcomes(draw: st.DrawFn) -> dict[Pair, str]:
    """How each pair ends; mostly alike, as in reality."""
    every = [(source, dest) for source in range(draw(st.integers(2, 4))) for dest in range(draw(st.integers(1, 3)))]
    usual = draw(st.sampled_from(["committed", "finished"]))
    other = draw(st.sampled_from(["committed", "finished", "failed", "aborted"]))
    odd = draw(st.sets(st.sampled_from(every)))
    return {pair: other if pair in odd else usual for pair in every}


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32), outcomes())
def test_one_outcome_for_any_order_and_any_failures(seed: int, ends: dict[Pair, str]) -> None:
    out = Run(random.Random(seed), ends).run()
    if set(ends.values()) == {"committed"}:
        assert isinstance(out[-1], DecodeCommitted)
    elif set(ends.values()) == {"finished"}:
        assert isinstance(out[-1], DecodeFinished)
    else:
        assert isinstance(out[-1], DecodeReleased)
    if "failed" in ends.values() or set(ends.values()) == {"committed", "finished"}:
        assert any(isinstance(event, DecodeFailed) for event in out) or "aborted" in ends.values()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32), outcomes())
def test_pages_of_p_are_released_once_and_when_all_pairs_are_quiet(seed: int, ends: dict[Pair, str]) -> None:
    rng = random.Random(seed)
    gather, left, out = PrefillGather(KEY, dict.fromkeys(ends, frozenset())), dict(ends), []
    while left:
        pair = rng.choice(list(left))
        for action in gather.handle(pair, PrefillReleased(KEY, left.pop(pair))):
            if isinstance(action, EndPair):
                assert action.pair in left
                left[action.pair] = action.reason if rng.random() < 0.7 else left[action.pair]
            else:
                assert not left, "released before all pairs are quiet"
                out.append(action)
        assert gather.handle(pair, PrefillReleased(KEY, "committed")) == []
    assert len(out) == 1
    alike = set(ends.values())
    assert (out[0].outcome in ("committed", "finished")) == (len(alike) == 1 and alike <= {"committed", "finished"})


def test_one_pair_is_passed_on_as_it_is() -> None:
    one: dict[Pair, frozenset[str]] = {(0, 0): frozenset({"target"})}
    for events in (
        [DecodeAdmitted(KEY), DecodeProgress(KEY, {"target": 3}), DecodeCommitted(KEY, seeds(0), 5, 2)],
        [DecodeAdmitted(KEY), DecodeFinished(KEY, seeds(0))],
        [DecodeFailed(KEY, "peer_lost", "x", True), DecodeReleased(KEY)],
        [DecodeReleased(KEY)],
    ):
        gather = DecodeGather(KEY, one, 0)
        assert [found for event in events for found in gather.handle((0, 0), event)] == events
    released = PrefillReleased(KEY, "lease_expired")
    assert PrefillGather(KEY, one).handle((0, 0), released) == [released]


def test_a_pair_that_nobody_waits_for_says_nothing() -> None:
    gather = DecodeGather(KEY, {(SAMPLING, 0): frozenset()}, SAMPLING)
    assert gather.handle((0, 7), DecodeCommitted(KEY, seeds(0), 1, 1)) == []
    with pytest.raises(ProtocolError, match="seeds of rank 5"):
        DecodeGather(KEY, {(0, 0): frozenset()}, 5)


class WithoutOneRank(DecodeGather):
    """Commits although one rank has not."""

    def _end(self, pair: Pair, event: HandoffEvent) -> list[HandoffEvent | EndPair]:
        if (
            len(self._ended) == len(self._pairs) - 2
            and isinstance(event, DecodeCommitted)
            and pair[0] == self._sampling
        ):
            self._ended = dict.fromkeys(self._pairs, event)
            return [DecodeCommitted(self._key, event.seeds, 10 * len(self._pairs), len(self._pairs))]
        return super()._end(pair, event)


class Hasty(DecodeGather):
    """Releases as soon as the first pair has."""

    def _end(self, pair: Pair, event: HandoffEvent) -> list[HandoffEvent | EndPair]:
        return super()._end(pair, event) + ([DecodeReleased(self._key)] if isinstance(event, DecodeReleased) else [])


class Seedless(DecodeGather):
    """Takes the seeds of any rank."""

    def _end(self, pair: Pair, event: HandoffEvent) -> list[HandoffEvent | EndPair]:
        self._sampling = pair[0]
        return super()._end(pair, event)


@pytest.mark.parametrize(
    ("mutation", "why"),
    [
        (WithoutOneRank, "a rank has not committed"),
        (Hasty, "released before all pairs are quiet"),
        (Seedless, "seeds of another rank"),
    ],
    ids=["commit_without_one_rank", "hasty", "seeds"],
)
def test_the_model_sees_what_it_is_there_to_see(mutation: type[DecodeGather], why: str) -> None:
    def play() -> None:
        for seed in range(200):
            rng = random.Random(seed)
            ends = {(source, dest): rng.choice(["committed"] * 5 + ["failed"]) for source in (0, 1) for dest in (0, 1)}
            run = Run(rng, ends)
            run.gather = mutation(KEY, run.groups, SAMPLING)
            run.run()

    with pytest.raises(AssertionError, match=why):
        play()


def ranks(name: str, tp: int, heads: int, kind: str = "full") -> list[RankGeometry]:
    width = max(1, heads // tp)
    out = []
    for rank in range(tp):
        spec = GroupSpec(
            name=name,
            owner="target",
            kind=kind,  # type: ignore[arg-type]
            planes=kv_planes(width, 2, "bfloat16") if kind == "full" else latent_planes(1, 1, "bfloat16"),
            page_size=4,
            layer_ids=(0,),
        )
        out.append(RankGeometry(rank=rank, geometry=Geometry.block_major(spec, 4, first_head=rank * heads // tp)))
    return out


def test_the_pairs_of_two_instances() -> None:
    four, two = {"target": ranks("target", 4, 4)}, {"target": ranks("target", 2, 4)}
    both = frozenset({"target"})
    assert pairs(four, two, 0) == {(0, 0): both, (1, 0): both, (2, 1): both, (3, 1): both}
    assert pairs(two, four, 0) == {(0, 0): both, (0, 1): both, (1, 2): both, (1, 3): both}
    # One rank sends all latents, and another has sampled: the latter only sends the seeds.
    latents = {"target": ranks("target", 2, 1, "mla")[:1]}
    sources = {"target": [RankGeometry(rank=3, geometry=latents["target"][0].geometry)]}
    assert pairs(sources, latents, 5) == {(3, 0): both, (5, 0): frozenset()}


def test_a_head_that_no_rank_holds_is_reported_with_the_own_side_first() -> None:
    """On both sides the error names the own side first."""
    p = Instance(rank=0, groups={"target": ranks("target", 2, 4)[:1]})
    d = Instance(rank=0, groups={"target": ranks("target", 1, 4)})
    lacks, wants = "nobody holds layer 0 head 2 of plane 'k'", "each head and layer from one rank"
    for here, peer, sends, order in ((p, d, True, (lacks, wants)), (d, p, False, (wants, lacks))):
        with pytest.raises(IncompatiblePeerError) as raised:
            pairs_with(here, peer, sends=sends)
        own, theirs = raised.value.fields["ranks"]
        assert order[0] in str(own)
        assert order[1] in str(theirs)

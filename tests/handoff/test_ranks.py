"""Instances of many ranks over real agents and memory: every wanted byte of every rank arrives, and nothing else is
written. A request is runnable on all ranks or on none, and no page is free before all its pairs are quiet.
"""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Iterator
from dataclasses import replace as replace_fields
from typing import Any

import msgspec
import pytest

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.agent import instance as node_instance
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.leg_events import DecodePages
from baton.handoff.plan import repeated
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.gather import DecodeGather, EndPair, Pair, PrefillGather, pairs_of
from baton.handoff.protocol.messages import Announce, AttemptKey
from testkit.handoffs.planes import LAYER_MAJOR_HND
from testkit.handoffs.ranks import SEEDS, Engine, Shape, hand_over, prefill, settle, ticket_for, wanted_of
from testkit.inside import change_hello, hello_of, rank_handoffs_of
from testkit.waiting import eventually


class Both:
    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def engine(self, name: str, shape: Shape, *schemes: str, **config: object) -> Engine:
        self.engines.append(Engine(name, shape, schemes or ("local://",), config))
        return self.engines[-1]


@pytest.fixture
def pair() -> Iterator[Both]:
    made = Both()
    yield made
    for engine in made.engines:
        engine.close()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("d_tp", [1, 2, 4])
@pytest.mark.parametrize("p_tp", [1, 2, 4])
def test_every_byte_of_every_rank_arrives(pair: Both, p_tp: int, d_tp: int, mode: str) -> None:
    """Sharded heads with more ranks than some groups have heads, replicated latents, a drafter with heads."""
    p = pair.engine("P", Shape(tp=p_tp))
    d = pair.engine("D", Shape(tp=d_tp, page_size=5, order=LAYER_MAJOR_HND))
    hand_over(p, d, mode, n=13, salt=1)
    hand_over(p, d, mode, n=8, hit=3, announced=False, salt=2)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    ("p_shape", "d_shape"),
    [
        (Shape(stages=(0, 1)), Shape(stages=(0, 3))),
        (Shape(tp=2, stages=(0, 2)), Shape(tp=1, page_size=6)),
        (Shape(tp=1), Shape(tp=2, stages=(0, 1, 3))),
        (Shape(tp=2, stages=(0, 3)), Shape(tp=4, stages=(0, 2))),
    ],
)
def test_stages_that_are_cut_differently(pair: Both, p_shape: Shape, d_shape: Shape, mode: str) -> None:
    p, d = pair.engine("P", p_shape), pair.engine("D", d_shape)
    hand_over(p, d, mode, salt=1)
    hand_over(p, d, mode, n=6, hit=4, announced=False, salt=2)


# ---------------------------------------------------------------- one rank fails


# The first copy takes a minute, or until `stop` is set.
SLOW = "faulty+local://?fault=delay&delay_s=60&every=1000"
# For an engine to tell, wrongly, that pages are free.
GRACE_S = 1.0
LOCAL = "local://"


def two_ranks(pair: Both, mode: str, scheme: str, first: str = LOCAL, **config: object) -> tuple[Engine, Engine]:
    """The second rank of the side that copies uses `scheme`, its first rank `first`; the other side has one rank."""
    many, one = Shape(tp=2), Shape(tp=1)
    if mode == "push":
        return pair.engine("P", many, first, scheme, **config), pair.engine("D", one, LOCAL, **config)
    return pair.engine("P", one, LOCAL, **config), pair.engine("D", many, first, scheme, **config)


def begin(p: Engine, d: Engine, mode: str, n: int = 13, **changes: object) -> AttemptKey:
    """Begin a handoff with all calls of both engines."""
    ticket = ticket_for(p, d, mode, **changes)
    p.together.open_prefill(ticket)
    for rank in p.ranks:
        rank.fill(p.pages(1, n), n, 7)
    prefill(p, ticket, n, p.pages(1, n))
    d.together.open_decode(ticket, n, wanted_of(n, 0), d.pages(2, n))
    return ticket.key


def failure(p: Engine, d: Engine) -> ev.DecodeFailed:
    """The one failure that D's engine gets; afterwards all pages of both are free, once."""
    failed = d.events.get(timeout=60)
    while isinstance(failed, ev.DecodeAdmitted):
        failed = d.events.get(timeout=60)
    assert isinstance(failed, ev.DecodeFailed), failed
    d.next(ev.DecodeReleased)
    released = p.next(ev.PrefillReleased)
    assert isinstance(released, ev.PrefillReleased)
    assert released.outcome not in ("committed", "finished")
    settle(p, d)
    assert p.events.empty()
    assert d.events.empty()
    return failed


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_copies_of_one_rank_that_fail_end_the_whole(pair: Both, mode: str) -> None:
    p, d = two_ranks(pair, mode, "faulty+local://?fault=fail", max_retries=1)
    begin(p, d, mode)
    failed = failure(p, d)
    assert (failed.reason, failed.recoverable) == ("transfer_failed", True)
    # D may first get the message about the other pair.
    assert ("rank 1 to rank 0" if mode == "push" else "rank 0 to rank 1") in failed.message


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_one_ranks_flipped_byte_is_repaired_there_alone(
    pair: Both, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks that hold other heads than the other side's have digests of the share that they exchange."""
    p, d = two_ranks(pair, mode, "faulty+local://?fault=corrupt&nbytes=1&every=1000")
    with caplog.at_level(logging.WARNING, "baton.handoff"):
        hand_over(p, d, mode)
    named = "(ranks 1 to 0)" if mode == "push" else "(ranks 0 to 1)"
    assert any(named in record.getMessage() for record in caplog.records if "do not match" in record.getMessage())
    issuer = p if mode == "push" else d
    assert issuer.stats("repairs") == [0, 1]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_bad_pieces_of_one_rank_fail_all_ranks(pair: Both, mode: str) -> None:
    p, d = two_ranks(pair, mode, "faulty+local://?fault=corrupt", max_retries=1)
    begin(p, d, mode)
    failed = failure(p, d)
    assert failed.reason == "integrity_failed"
    assert "rank 1" in failed.message


@pytest.mark.parametrize("side", ["P", "D"])
def test_one_rank_that_leaves_ends_the_whole(pair: Both, side: str) -> None:
    p, d = pair.engine("P", Shape(tp=2)), pair.engine("D", Shape(tp=2))
    ticket = ticket_for(p, d, "push")
    p.together.open_prefill(ticket)
    p.together.admit_prefill(ticket.key)
    d.together.announce_decode(ticket)
    d.next(ev.DecodeAdmitted)
    d.together.open_decode(ticket, 13, wanted_of(13, 0), d.pages(2, 13))
    (p if side == "P" else d).ranks[1].agent.close()
    if side == "P":
        assert failure(p, d).reason in ("peer_lost", "engine_closed")
        return
    assert p.next(ev.PrefillReleased) == ev.PrefillReleased(ticket.key, "engine_closed")
    # The lost rank never proved its pages quiet, so no rank's pages are free.
    other = d.ranks[0].agent
    eventually(lambda: not other.stats().outstanding)
    other.close()  # its events have all come
    assert not any(isinstance(event, ev.DecodeReleased) for event in list(d.events.queue))


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_the_first_token_ends_it_on_all_ranks(pair: Both, late: bool, known: bool) -> None:
    p, d = pair.engine("P", Shape(tp=2, stages=(0, 2))), pair.engine("D", Shape(tp=2))
    if known:
        hand_over(p, d, "push")
    ticket = ticket_for(p, d, "push")
    if not late:
        d.together.announce_decode(ticket)
    p.together.open_prefill(ticket)
    p.together.admit_prefill(ticket.key)
    p.together.declare_final(ticket.key, 5, p.pages(1, 5), {"target": 5})
    p.together.finish_prefill(ticket.key, SEEDS, True, {})
    if late:
        if not known:
            # P holds nothing for ranks that it does not know.
            assert p.next(ev.PrefillReleased) == ev.PrefillReleased(ticket.key, "finished")
        d.together.announce_decode(ticket)
    event = d.events.get(timeout=60)
    assert (event if isinstance(event, ev.DecodeFinished) else d.next(ev.DecodeFinished)) == ev.DecodeFinished(
        ticket.key, SEEDS
    )
    if known or not late:
        assert p.next(ev.PrefillReleased) == ev.PrefillReleased(ticket.key, "finished")
    settle(p, d)
    assert p.events.empty()
    assert d.events.empty()


@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("when", ["alone", "announced", "registered"])
def test_either_engine_gives_up_at_any_time(pair: Both, side: str, when: str) -> None:
    p, d = pair.engine("P", Shape(tp=2)), pair.engine("D", Shape(tp=4))
    ticket = ticket_for(p, d, "pull")
    taken: queue.Queue[None] = queue.Queue()
    if when != "alone" or side == "P":
        p.together.open_prefill(ticket)
    if when != "alone" or side == "D":
        d.together.announce_decode(ticket)
    if when != "alone":
        p.together.admit_prefill(ticket.key)
        d.next(ev.DecodeAdmitted)
    if when == "registered":
        d.together.open_decode(ticket, 13, wanted_of(13, 0), d.pages(2, 13))
    (p if side == "P" else d).together.abort(ticket.key, "aborted", lambda: taken.put(None))
    taken.get(timeout=60)
    if when != "alone" or side == "D":
        event = d.events.get(timeout=60)
        if side == "P":
            assert isinstance(event, ev.DecodeFailed)
            event = d.next(ev.DecodeReleased)
        assert isinstance(event, ev.DecodeReleased)
    if when != "alone" or side == "P":
        assert p.next(ev.PrefillReleased) == ev.PrefillReleased(ticket.key, "aborted")
    settle(p, d)
    assert taken.empty()


def quiet_when_told(engine: Engine, issuer: Engine) -> list[int]:
    """The number of copies of `issuer` in progress when `engine` is told that pages are free."""
    under_way: list[int] = []
    tell = engine.together._on_event

    def note(event: ev.HandoffEvent) -> None:
        if isinstance(event, ev.PrefillReleased | ev.DecodeReleased):
            under_way.append(sum(len(rank_handoffs_of(rank.agent).operations) for rank in issuer.ranks))
        tell(event)

    engine.together._on_event = note
    return under_way


def abort_while_one_rank_copies(pair: Both, mode: str, grace_s: float = GRACE_S) -> None:
    # If the first rank's copies were fast, its pair could commit before the second rank begins to copy.
    p, d = two_ranks(pair, mode, SLOW, first=SLOW)
    issuer = p if mode == "push" else d
    transport, copies = issuer.ranks[1].transport, []
    submit = transport.submit

    def noted(*arguments: Any) -> Any:
        copies.append(submit(*arguments))
        return copies[-1]

    transport.submit = noted  # type: ignore[method-assign]
    # This rank's copies go on to their end, in spite of aborts.
    transport.cancel = lambda operation: None  # type: ignore[method-assign]
    under_way = quiet_when_told(issuer, issuer)
    key = begin(p, d, mode)
    eventually(lambda: copies)
    issuer.together.abort(key, "aborted")
    until = time.monotonic() + grace_s
    while not under_way and time.monotonic() < until:
        time.sleep(0.005)
    copies[0].stop.set()
    p.next(ev.PrefillReleased)
    settle(p, d)
    assert under_way == [0], "free pages while a rank copies"


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_pages_of_no_rank_are_free_while_one_rank_copies(pair: Both, mode: str) -> None:
    abort_while_one_rank_copies(pair, mode)


# ---------------------------------------------------------------- valid participants


def test_ranks_that_nobody_has_are_refused_by_name(pair: Both) -> None:
    p, d = pair.engine("P", Shape(tp=4, groups=("draft",))), pair.engine("D", Shape(tp=1, groups=("draft",)))
    for rank in p.ranks:
        sessions = rank_handoffs_of(rank.agent).sessions
        said = hello_of(sessions).instance
        without = {group: [each for each in ranks if each.rank != 2] for group, ranks in said.groups.items()}
        change_hello(sessions, instance=msgspec.structs.replace(said, groups=without))
    ticket = ticket_for(p, d, "push")
    d.together.open_decode(ticket, 5, {"draft": wanted_of(5, 0)["draft"]}, d.pages(2, 5))
    failed = d.next(ev.DecodeFailed)
    assert isinstance(failed, ev.DecodeFailed)
    assert failed.reason == "incompatible_peer"
    assert "nobody holds layer 0 head 2 of plane 'k'" in failed.message
    d.next(ev.DecodeReleased)


def test_groups_that_one_instance_lacks_are_named() -> None:
    whole, less = Shape(tp=2).instance(0), Shape(tp=2, groups=("target",)).instance(0)
    with pytest.raises(IncompatiblePeerError, match=r"one side alone has groups \['draft', 'latent'\]"):
        pairs_of(whole, less)
    key = AttemptKey(b"x" * 16, 0, "p", "d")
    pages = DecodePages(None, 5, wanted_of(5, 0), {})  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="on no rank"):
        InstanceAgent(less, print).post(key, pages)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ([0], "P has 2 ranks, the ticket names 1"),
        ([0, 1, 1], "P has 2 ranks, the ticket names 3"),
        ([1, 0], "rank 1 is at .* instead of rank 0"),
    ],
)
def test_a_ticket_names_every_rank_at_its_place(pair: Both, order: list[int], why: str) -> None:
    p, d = pair.engine("P", Shape(tp=2)), pair.engine("D", Shape(tp=1))
    ticket = ticket_for(p, d, "push", prefill_addresses=[p.addresses[rank] for rank in order])
    d.together.open_decode(ticket, 5, wanted_of(5, 0), d.pages(2, 5))
    failed = d.next(ev.DecodeFailed)
    assert isinstance(failed, ev.DecodeFailed)
    assert failed.reason == "incompatible_peer"
    assert re.search(why, failed.message)
    d.next(ev.DecodeReleased)


def test_a_rank_speaks_for_its_own_pairs_alone(pair: Both) -> None:
    """A valid ticket does not let one rank of D claim anything in another's name."""
    p, d = pair.engine("P", Shape(tp=2)), pair.engine("D", Shape(tp=2))
    hand_over(p, d, "push")
    ticket = ticket_for(p, d, "push")
    p.together.open_prefill(ticket)
    handoffs = rank_handoffs_of(d.ranks[0].agent)
    (session,) = handoffs.sessions.servers.values()
    before = p.ranks[0].agent.stats().rejected
    for pair_ in ((0, 1), (1, 0), (5, 5)):
        key = ticket.key.of_pair(pair_)
        d.ranks[0].agent._call(lambda key=key: handoffs.channel.send(session.connection, Announce(key, ticket.text)))
    eventually(lambda: p.ranks[0].agent.stats().rejected >= before + 3)
    assert p.ranks[0].agent.stats().rejected == before + 3
    assert not [key for key in rank_handoffs_of(p.ranks[0].agent).runner.prefills.live if key.pair != (0, 0)]
    p.together.abort(ticket.key, "aborted")
    p.next(ev.PrefillReleased)
    settle(p, d)


# ---------------------------------------------------------------- broken engines are detected


class WithoutOneRank(DecodeGather):
    """Commits although one rank has not."""

    def _end(self, pair: Pair, event: ev.HandoffEvent) -> list[ev.HandoffEvent | EndPair]:
        if (
            isinstance(event, ev.DecodeCommitted)
            and pair[0] == self._sampling
            and len(self._ended) < len(self._pairs) - 1
        ):
            self._ended = dict.fromkeys(self._pairs, event)
            return [ev.DecodeCommitted(self._key, event.seeds, 0, 0)]
        return super()._end(pair, event)


class Seedless(DecodeGather):
    """Takes the seeds of any rank."""

    def _end(self, pair: Pair, event: ev.HandoffEvent) -> list[ev.HandoffEvent | EndPair]:
        self._sampling = next(source for source, _ in self._pairs if source != 0)
        return super()._end(pair, event)


class Hasty(PrefillGather):
    """Reports pages free when those of the first pair are."""

    def handle(self, pair: Pair, event: ev.PrefillReleased) -> list[ev.PrefillReleased | EndPair]:
        super().handle(pair, event)
        return [ev.PrefillReleased(self._key, event.outcome)]


def test_a_commit_without_one_rank_is_seen(pair: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_instance, "DecodeGather", WithoutOneRank)
    p, d = two_ranks(pair, "push", SLOW)
    with pytest.raises(AssertionError, match="plane"):
        hand_over(p, d, "push")


def test_seeds_of_a_rank_that_does_not_sample_are_seen(pair: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_instance, "DecodeGather", Seedless)
    p, d = two_ranks(pair, "push", LOCAL)
    with pytest.raises(AssertionError, match="first_token=2147483647"):
        hand_over(p, d, "push")


def test_pages_that_are_free_while_one_pair_is_open_are_seen(pair: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_instance, "PrefillGather", Hasty)
    with pytest.raises(AssertionError, match="free pages while a rank copies"):
        abort_while_one_rank_copies(pair, "push", 60.0)  # a slow machine tells late


@pytest.mark.parametrize("integrity", ["off", "full"])
def test_a_wrong_share_of_heads_is_seen(pair: Both, monkeypatch: pytest.MonkeyPatch, integrity: str) -> None:
    """Without digests the bytes differ, with them the protocol detects it."""
    plan = repeated.plan_copies

    def turned(sources: object, dest: object, *rest: object) -> object:
        every = plan(sources, dest, *rest)  # type: ignore[arg-type]
        return {
            rank: replace_fields(found, source_offset=found.source_offset[::-1].copy()) for rank, found in every.items()
        }

    monkeypatch.setattr(repeated, "plan_copies", turned)
    p, d = two_ranks(pair, "pull", LOCAL, integrity=integrity, max_retries=0)
    if integrity == "off":
        with pytest.raises(AssertionError, match="group target"):
            hand_over(p, d, "pull")
    else:
        begin(p, d, "pull")
        assert failure(p, d).reason == "integrity_failed"

"""Two agents in one process: real sockets, real transports, real bytes."""

from __future__ import annotations

import multiprocessing
import re
import socket
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import zmq

from baton.errors import ProtocolError
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.events import (
    DecodeAdmitted,
    DecodeCommitted,
    DecodeFailed,
    DecodeFinished,
    DecodeReleased,
    PrefillReleased,
)
from baton.handoff.protocol.fingerprint import geometry_fields
from baton.handoff.protocol.frames import encode_frame
from baton.handoff.protocol.messages import Cancel, Hello, Register
from baton.handoff.protocol.ticket import sign_ticket
from baton.handoff.session.curve import as_client
from baton.handoff.session.keys import TicketKeys
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from simulation.fuzz.pair import DIM, HEADS, NUM_PAGES
from testkit.handoffs.nodes import (
    KEY,
    SEEDS,
    TIMERS,
    Node,
    Pair,
    hand_over,
    settle,
    ticket_for,
)
from testkit.handoffs.tickets import signed
from testkit.inside import change_hello, hello_of, is_woken, rank_handoffs_of
from testkit.waiting import eventually


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_handoff_moves_exactly_the_wanted_bytes(pair: Pair, mode: str, when: str) -> None:
    p, d = pair.both()
    for n in (1, 2, 4, 8, 11, 33):
        for hit in (0, 3, n):
            hand_over(p, d, mode, n, when, hit, salt=n)
    stats = d.agent.stats()
    assert stats.handoffs == 18
    assert stats.failures == {}
    assert stats.bytes > 0
    assert stats.runs >= 18


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_unequal_page_sizes_over_shared_memory(pair: Pair, mode: str) -> None:
    p, d = pair.both("shm://", 4, 7)
    for n in (3, 28, 29):
        hand_over(p, d, mode, n, "during", hit=2)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("early", [True, False])
def test_first_token_ends_the_request(pair: Pair, mode: str, early: bool) -> None:
    p, d = pair.both()
    ticket = ticket_for(p, d, mode)
    source, dest = p.pages(1, 8), d.pages(3, 8)
    if early:
        d.agent.open_decode(ticket, 8, {"target": Interval(0, 8), "draft": Interval(0, 8)}, dest)
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, 8, source, {"target": 8, "draft": 7})
    p.agent.finish_prefill(ticket.key, SEEDS, True, {})
    assert p.next(PrefillReleased) == PrefillReleased(ticket.key, "finished")
    if not early:
        d.agent.open_decode(ticket, 8, {"target": Interval(0, 8), "draft": Interval(0, 8)}, dest)
    assert d.next(DecodeFinished) == DecodeFinished(ticket.key, SEEDS)
    settle(p, d)


@pytest.mark.parametrize("d_spoke", [False, True])
def test_ps_leg_wakes_the_thread_only_if_d_waits_for_it(pair: Pair, d_spoke: bool) -> None:
    p, d = pair.both()
    ticket, held, goes_on = ticket_for(p, d, "push"), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert goes_on.wait(60)

    if d_spoke:
        d.agent.announce_decode(ticket)
        eventually(lambda: rank_handoffs_of(p.agent).knows(ticket.key))
    p.agent.abort(ticket_for(p, d, "push").key, "failed", hold)
    assert held.wait(60)
    p.agent.open_prefill(ticket)
    p.agent.admit_prefill(ticket.key)
    assert is_woken(p.agent) == d_spoke
    p.agent.abort(ticket_for(p, d, "push").key, "failed")
    assert is_woken(p.agent)
    goes_on.set()
    if not d_spoke:
        d.agent.announce_decode(ticket)
    assert d.next(DecodeAdmitted).key == ticket.key
    p.agent.abort(ticket.key, "failed")
    settle(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("when", ["opened", "registered", "declared", "sampled"])
def test_abort_from_either_side_releases_both_once(pair: Pair, mode: str, side: str, when: str) -> None:
    p, d = pair.both()
    ticket = ticket_for(p, d, mode)
    key, n = ticket.key, 16
    wanted, source, dest = {"target": Interval(0, n), "draft": Interval(0, n)}, p.pages(1, n), d.pages(3, n)
    steps = {
        "opened": lambda: p.agent.open_prefill(ticket),
        "registered": lambda: d.agent.open_decode(ticket, n, wanted, dest),
        "declared": lambda: p.agent.declare_final(key, n, source, {"target": n, "draft": n - 1}),
        "sampled": lambda: p.agent.finish_prefill(key, SEEDS, False, {"draft": n}),
    }
    aborter = p if side == "P" else d
    for name, step in steps.items():
        step()
        if name == when:
            aborter.agent.abort(key, "client_gone")
    settle(p, d)
    p_events = [p.events.get(timeout=60)]
    d_events = []
    while not any(isinstance(event, DecodeCommitted | DecodeReleased) for event in d_events):
        d_events.append(d.events.get(timeout=60))
    settle(p, d)
    assert p.events.empty()
    assert d.events.empty()
    assert isinstance(p_events[0], PrefillReleased)
    if isinstance(d_events[-1], DecodeCommitted):
        # The abort came after the commit, or before D was opened.
        assert p_events[0].outcome in ("committed", "client_gone")
    else:
        assert p_events[0].outcome == "client_gone"
    if side == "P" and isinstance(d_events[-1], DecodeReleased):
        assert isinstance(d_events[0], DecodeFailed)
        assert d_events[0].reason == "client_gone"
    assert p.agent.stats().quarantined == d.agent.stats().quarantined == 0


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_pages_of_an_aborted_handoff_may_be_overwritten_while_they_are_copied(pair: Pair, mode: str) -> None:
    """`taken` does not wait for copies, and nothing copied after it is committed."""
    p, d = pair.both("faulty+local://?fault=delay&delay_s=60")
    ticket, n, taken = ticket_for(p, d, mode), 16, threading.Event()
    source, dest = p.pages(1, n), d.pages(3, n)
    d.agent.open_decode(ticket, n, {"target": Interval(0, n), "draft": Interval(0, n)}, dest)
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, n, source, {"target": n, "draft": n - 1})
    p.agent.finish_prefill(ticket.key, SEEDS, False, {"draft": n})
    eventually(lambda: any(len(rank_handoffs_of(node.agent).operations) for node in (p, d)))
    p.agent.abort(ticket.key, "preempted", taken.set)
    assert taken.wait(30)
    for pool in p.pools.values():
        pool[:] = -1.0
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.reason == "preempted"
    d.next(DecodeReleased)
    assert p.next(PrefillReleased) == PrefillReleased(ticket.key, "preempted")
    settle(p, d)


def test_d_gives_up_before_p_is_opened(pair: Pair) -> None:
    p, d = pair.both()
    ticket = ticket_for(p, d, "push")
    d.agent.open_decode(ticket, 8, {}, {})
    d.agent.abort(ticket.key, "client_gone")
    while not isinstance(d.events.get(timeout=60), DecodeReleased):
        pass  # P may have refused the REGISTER, which wants nothing, before D aborted
    time.sleep(0.05)
    p.agent.open_prefill(ticket)
    released = p.next(PrefillReleased)
    assert isinstance(released, PrefillReleased)
    assert released.outcome in ("client_gone", "register_refused"), released
    settle(p, d)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_peer_that_never_joins_ends_in_a_named_timeout(pair: Pair, mode: str) -> None:
    p, d = pair.both()
    alone = ticket_for(p, d, mode, life=1.0)
    p.agent.open_prefill(alone)
    p.agent.declare_final(alone.key, 4, p.pages(1, 4), {"target": 4, "draft": 3})
    p.agent.finish_prefill(alone.key, SEEDS, False, {"draft": 4})
    assert p.next(PrefillReleased) == PrefillReleased(alone.key, "handoff_timeout")
    other = ticket_for(p, d, mode, life=1.0)
    d.agent.open_decode(other, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.reason == "handoff_timeout"
    d.next(DecodeReleased)
    settle(p, d)


def test_an_address_that_takes_connections_and_says_nothing(pair: Pair) -> None:
    p, d = pair.node("P"), pair.node("D", timers=replace(TIMERS, handoff=1.0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ticket = ticket_for(p, d, "push", prefill_addresses=[f"tcp://127.0.0.1:{server.getsockname()[1]}"])
        d.agent.open_decode(ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
        failed = d.next(DecodeFailed)
        assert isinstance(failed, DecodeFailed)
        assert failed.reason == "handoff_timeout"
        d.next(DecodeReleased)


def test_incompatible_engines_are_refused_field_by_field(pair: Pair) -> None:
    p = pair.node("P", fingerprint={"model": "m", "drafter": "e3"})
    d = pair.node("D", fingerprint={"model": "x", "drafter": "e3"})
    ticket = ticket_for(p, d, "push")
    d.agent.open_decode(ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.reason == "incompatible_peer"
    assert "model: here 'x', peer 'm'" in failed.message
    assert "drafter" not in failed.message
    d.next(DecodeReleased)
    settle(d)


def test_ranks_that_a_pair_does_not_bring_are_not_forgotten(pair: Pair) -> None:
    """Two ranks share one rank's heads, so the whole engines match, but a pair would bring half of the bytes."""
    p, d = pair.both()
    halves = {group: [half(rank.geometry, number) for number in range(2)] for group, rank in p.geometries.items()}
    assert_refused(p, d, Instance(rank=0, groups=halves), r"group\.target\.ranks: here \[0\], peer \[0, 1\]")


@pytest.mark.parametrize("groups", ["none", "another rank's"])
def test_groups_that_only_the_fingerprint_has_are_missed(pair: Pair, groups: str) -> None:
    p, d = pair.both()
    sessions = rank_handoffs_of(p.agent).sessions
    facts = {**hello_of(sessions).fingerprint, **geometry_fields(hello_of(sessions).instance)}
    change_hello(sessions, fingerprint=facts)
    instance = (
        Instance(rank=0, groups={}) if groups == "none" else Instance(rank=3, groups=hello_of(sessions).instance.groups)
    )
    assert_refused(p, d, instance, r"group\.target\.ranks")


def half(geometry: Geometry, rank: int) -> RankGeometry:
    """One of two ranks that share the heads."""
    spec = GroupSpec(
        name=geometry.group,
        owner="target",
        kind="full",
        planes=kv_planes(HEADS // 2, DIM, "float32"),
        page_size=geometry.page_size,
        layer_ids=geometry.layer_ids,
    )
    shard = Geometry.block_major(spec, NUM_PAGES, region=geometry.region, first_head=rank * HEADS // 2)
    return RankGeometry(rank=rank, geometry=shard)


def assert_refused(p: Node, d: Node, said: Instance, why: str) -> None:
    """D refuses a P whose HELLO contains the instance `said`."""
    sessions = rank_handoffs_of(p.agent).sessions
    change_hello(sessions, instance=said)
    ticket = ticket_for(p, d, "pull")
    d.agent.open_decode(ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, 4, p.pages(1, 4), {"target": 4, "draft": 4})
    p.agent.finish_prefill(ticket.key, SEEDS, False, {})
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert failed.reason == "incompatible_peer"
    assert re.search(why, failed.message)
    d.next(DecodeReleased)
    settle(d)


def test_a_refused_engine_tells_p_that_the_attempt_is_over(pair: Pair) -> None:
    """Otherwise its ticket would hold P's pages for minutes."""
    p, d = pair.node("P", fingerprint={"model": "m"}), pair.node("D", fingerprint={"model": "x"})
    ticket = ticket_for(p, d, "push")
    p.agent.open_prefill(ticket)
    p.agent.admit_prefill(ticket.key)
    d.agent.announce_decode(ticket)
    d.next(DecodeFailed)
    d.next(DecodeReleased)
    released = p.next(PrefillReleased)
    assert released == PrefillReleased(ticket.key, "incompatible_peer")
    settle(p, d)


@pytest.mark.parametrize("fault", ["key", "other_engine"])
def test_a_bad_ticket_is_refused(pair: Pair, fault: str) -> None:
    # D knocks until its lease ends.
    p = pair.node("P")
    d = pair.node("D", ticket_key=b"x" * 32 if fault == "key" else KEY, timers=replace(TIMERS, renew=0.5, lease=1.5))
    changes = {"prefill_engine": "Q"} if fault == "other_engine" else {}
    ticket = ticket_for(p, d, "push", **changes)
    d.agent.open_decode(ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    if fault == "key":
        assert (failed.reason, failed.recoverable) == ("unreachable_peer", True)
        assert "has another ticket key" in failed.message
        # D's agent may hear of the refusal before P's has counted it.
        eventually(lambda: p.agent.stats().refused >= 1)
        assert p.agent.stats().frames == 0
    else:
        assert failed.reason == "register_refused"
        assert "another prefill engine" in failed.message
        eventually(lambda: p.agent.stats().rejected >= 1)
    d.next(DecodeReleased)
    settle(p, d)


def test_a_claim_that_comes_too_late_can_be_computed_anew(pair: Pair) -> None:
    """For example P was paused: it never saw the attempt, and the ticket has expired. The request can be recomputed."""
    p, d = pair.both()
    ticket = ticket_for(p, d, "push", prefill_expiry=time.monotonic() - 0.1)
    d.agent.announce_decode(ticket)
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    assert (failed.reason, failed.recoverable) == ("ticket_expired", True)
    d.next(DecodeReleased)
    settle(p, d)


def test_a_ticket_of_another_engine_is_not_opened(pair: Pair) -> None:
    p, d = pair.both()
    ticket = ticket_for(p, d, "push")
    with pytest.raises(ProtocolError, match="another engine"):
        d.agent.open_prefill(ticket)
    with pytest.raises(ProtocolError, match="another engine"):
        p.agent.open_decode(ticket, 4, {}, {})
    with pytest.raises(ProtocolError, match="beyond"):
        d.agent.open_decode(ticket, 4, {"target": Interval(0, 5)}, {})


def test_pages_out_of_range_are_refused(pair: Pair) -> None:
    p, d = pair.both()
    for bad in ([NUM_PAGES], [0], [3, 3], []):
        ticket = ticket_for(p, d, "push")
        p.agent.open_prefill(ticket)
        d.agent.open_decode(
            ticket,
            8,
            {"target": Interval(0, 4 * max(1, len(bad))), "draft": Interval(0, 4)},
            {"target": bad, "draft": [1]},
        )
        failed = d.next(DecodeFailed)
        assert isinstance(failed, DecodeFailed)
        assert "target" in failed.message
        d.next(DecodeReleased)
        p.next(PrefillReleased)
    settle(p, d)
    hand_over(p, d, "push", 9, "during")


def test_a_later_attempt_supersedes_the_earlier(pair: Pair) -> None:
    p, d = pair.both()
    other = pair.node("E")
    first = ticket_for(p, d, "pull")
    again = signed(
        msgspec.structs.replace(
            first, attempt=1, decode_engine="E", decode_incarnation="E-1", decode_addresses=[other.agent.address]
        ),
        KEY,
    )
    wanted = {"target": Interval(0, 8), "draft": Interval(0, 8)}
    p.agent.open_prefill(first)
    d.agent.open_decode(first, 8, wanted, d.pages(1, 8))
    eventually(lambda: d.agent.stats().outstanding)
    p.agent.open_prefill(again)
    assert p.next(PrefillReleased) == PrefillReleased(first.key, "superseded")
    source = p.pages(1, 8)
    p.fill(source, 8, 3.0)
    p.agent.declare_final(again.key, 8, source, {"target": 8, "draft": 7})
    p.agent.finish_prefill(again.key, SEEDS, False, {"draft": 8})
    other.agent.open_decode(again, 8, wanted, other.pages(1, 8))
    other.next(DecodeCommitted)
    assert p.next(PrefillReleased) == PrefillReleased(again.key, "committed")
    d.next(DecodeFailed)
    d.next(DecodeReleased)
    settle(p, d, other)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("dies", ["P", "D"])
def test_closing_one_engine_frees_the_other(pair: Pair, mode: str, dies: str) -> None:
    p, d = pair.both()
    ticket = ticket_for(p, d, mode)
    p.agent.open_prefill(ticket)
    d.agent.open_decode(ticket, 8, {"target": Interval(0, 8), "draft": Interval(0, 8)}, d.pages(1, 8))
    p.agent.declare_final(ticket.key, 8, p.pages(1, 8), {"target": 4, "draft": 3})
    # Before that, P has nothing that connects its leg with D.
    eventually(lambda: (attempt := rank_handoffs_of(p.agent).runner.prefills.get(ticket.key)) and attempt.session)
    (p if dies == "P" else d).close()
    if dies == "P":
        d.next(DecodeFailed)
        d.next(DecodeReleased)
        settle(d)
    else:
        p.next(PrefillReleased)
        settle(p)


def serve_prefill(pipe: Connection) -> None:
    """The main function of a P in its own process, which stays idle."""
    node = Node("P", "shm://")
    pipe.send(node.agent.address)
    node.agent.open_prefill(pipe.recv())
    pipe.recv()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_killed_peer_is_noticed_and_fenced(pair: Pair, mode: str) -> None:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    child = context.Process(target=serve_prefill, args=(there,), daemon=True)
    child.start()
    try:
        d = pair.node("D", "shm://")
        address = here.recv() if here.poll(60) else pytest.fail("the child did not start")
        fields = {"prefill_engine": "P", "prefill_incarnation": "P-1", "prefill_addresses": [address]}
        ticket = ticket_for(d, d, mode, **fields)
        here.send(ticket)
        d.agent.open_decode(ticket, 8, {"target": Interval(0, 8), "draft": Interval(0, 8)}, d.pages(1, 8))
        eventually(lambda: d.agent.stats().sessions)
        child.kill()
        failed = d.next(DecodeFailed)
        assert isinstance(failed, DecodeFailed)
        assert failed.reason == "peer_lost"
        d.next(DecodeReleased)
        settle(d)
    finally:
        child.kill()
        child.join(60)


def test_digests_keep_the_agent_from_nothing(pair: Pair) -> None:
    """Digests of a long prompt take seconds, in which the agent must renew leases and take legs."""
    p, d = pair.node("P", integrity="full"), pair.node("D", integrity="full")
    begun, go_on, taken = threading.Event(), threading.Event(), threading.Event()
    real = d.digester.digests

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return real(*arguments)

    d.digester.digests = slow  # type: ignore[method-assign]
    ticket = ticket_for(p, d, "push")
    try:
        d.agent.open_decode(ticket, 8, {"target": Interval(0, 8), "draft": Interval(0, 8)}, d.pages(3, 8))
        p.agent.open_prefill(ticket)
        p.agent.declare_final(ticket.key, 8, p.pages(1, 8), {"target": 8, "draft": 7})
        p.agent.finish_prefill(ticket.key, SEEDS, False, {"draft": 8})
        assert begun.wait(60)
        d.agent.abort(ticket_for(p, d, "push").key, "another", taken.set)
        assert taken.wait(60)
    finally:
        go_on.set()
    d.next(DecodeCommitted)
    settle(p, d)


def test_garbage_never_stops_the_agent(pair: Pair) -> None:
    p, d = pair.both()
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    keys = TicketKeys(KEY)
    as_client(sock, keys, keys.public)
    sock.connect(p.agent.address)
    hello = Hello("D", "D-1", {}, Instance(rank=0, groups={}), bytes(16))
    ticket = ticket_for(p, d, "push")
    frames = [
        b"",
        b"\xc1" * 100,
        b"\x80\x04\x95",
        encode_frame(Cancel(ticket.key, "x"), 7, 1),
        encode_frame(hello, 7, 1),
        encode_frame(Register(ticket.key, ticket=sign_ticket(KEY, ticket), wanted={}, pages={}), 7, 2),
        encode_frame(hello, 7, 1),
    ]
    for frame in frames:
        sock.send(frame)
    sock.send_multipart([b"a", b"b"])
    eventually(lambda: p.agent.stats().malformed >= 4)
    stats = p.agent.stats()
    assert stats.malformed == 4
    assert stats.rejected >= 1
    sock.close(0)
    context.term()
    hand_over(p, d, "push", 9, "during")

"""Leases, eviction, rejoining and repetition: real agents over a modelled network, with a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.errors import ProtocolError
from baton.handoff.protocol.events import (
    DecodeCommitted,
    DecodeFailed,
    DecodeReleased,
    PrefillReleased,
)
from baton.handoff.protocol.messages import Ack, Cancel, Cancelled, Hello, Register, Renew
from baton.handoff.session.base import Connection
from baton.handoff.session.config import Timers
from baton.kv.interval import Interval
from baton.transports.base import Operation, Peer
from testkit.handoffs.modelled_network import STEP, TIMERS, N, Node, StuckTransport, World
from testkit.inside import peers_of


@pytest.fixture(params=["push", "pull"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_sessions_outlive_their_lease_while_both_live(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    world.hand_over(p, d)
    world.run(60)
    assert p.handoffs.stats().sessions == d.handoffs.stats().sessions == 1
    assert p.handoffs.stats().lost_leases == d.handoffs.stats().lost_leases == 0
    assert len(d.sent(Hello)) == 2, "one with the challenge and one with the proof, and none in an open session"
    sessions = [*p.handoffs.sessions.clients.values(), *d.handoffs.sessions.servers.values()]
    assert all(session.round_trip is not None and 0 < session.round_trip <= 3 * STEP for session in sessions)


@pytest.mark.parametrize("name", ["P", "D"])
def test_an_idle_engine_wakes_when_a_renewal_is_due(world: World, name: str) -> None:
    """Later, it would be sent in the midst of the next handoff."""
    found = {each: Node(world, each) for each in ("P", "D")}
    world.hand_over(found["P"], found["D"])
    world.run(5.3)
    node = found[name].handoffs
    (session,) = [*node.sessions.clients.values(), *node.sessions.servers.values()]
    due = session.renew_sent + TIMERS.renew - world.clock.now
    assert 0 < due < TIMERS.renew - STEP
    assert node.run_timers() == pytest.approx(due)


def test_sessions_are_renewed_together(world: World) -> None:
    d = Node(world, "D")
    for name in ("P", "Q", "R"):
        world.hand_over(Node(world, name), d)
        world.run(0.35)
    world.run(5)
    sessions = d.handoffs.sessions.servers.values()
    assert len(sessions) == 3
    assert len({session.renew_sent for session in sessions}) == 1


def test_an_ack_lets_the_first_step_go_ahead(world: World) -> None:
    """It waits its time, but not for the end of its engine."""
    timers = replace(TIMERS, retry_min=7 * STEP, retry=7 * STEP)
    p, d = Node(world, "P"), Node(world, "D", timers)
    for number, closes in enumerate((False, True)):
        ticket = world.begin(p, d, "push")
        world.prefill(p, ticket)
        while d.count(DecodeCommitted) == number:
            world.run(STEP)
        committed = world.clock.now
        world.run(2 * STEP)
        assert len(d.sent(Ack)) == number
        if closes:
            d.handoffs.abort_all()
        world.run(1.0)
        assert p.count(PrefillReleased) == number + 1
        assert d.sent(Ack)[-1] - committed == pytest.approx((2 if closes else 4) * STEP)


def test_an_engine_wakes_when_an_ack_is_due(world: World) -> None:
    """Beside another attempt that has nothing to do until then."""
    timers = replace(TIMERS, retry_min=2.0, retry=2.0, check=60.0)
    p, d = Node(world, "P"), Node(world, "D", timers)
    ticket = world.begin(p, d, "push")
    world.begin(p, d, "push")
    world.prefill(p, ticket)
    while not d.count(DecodeCommitted):
        world.run(STEP)
    assert timers.ack - 2 * STEP < d.handoffs.run_timers() <= timers.ack


def test_a_session_that_nothing_needs_ends_and_another_begins_when_needed(world: World, mode: str) -> None:
    timers = replace(TIMERS, idle=20.0)
    p, d, other = Node(world, "P", timers), Node(world, "D", timers), Node(world, "Q", timers)
    world.hand_over(p, d, mode)
    world.hand_over(other, d, mode)
    world.run(90)
    assert d.handoffs.stats().sessions == 2, "a ticket has not expired, so an attempt is remembered"
    world.begin(other, d, mode)
    world.run(60)
    assert (p.handoffs.stats().sessions, other.handoffs.stats().sessions, d.handoffs.stats().sessions) == (0, 1, 1)
    assert (len(peers_of(p.transport)), len(peers_of(d.transport))) == (0, 1)
    world.hand_over(p, d, mode)
    assert sum(node.handoffs.stats().lost_leases for node in (p, d, other)) == 0


def test_a_silent_prefill_engine_costs_its_lease_and_frees_nothing_it_may_write(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.begin(p, d, "push")
    p.paused = True
    world.run(TIMERS.lease - 1)
    assert d.failures() == []
    world.run(2)
    assert [event for event in d.events if isinstance(event, DecodeFailed)] == [
        DecodeFailed(ticket.key, "lease_expired", "engine P was silent for 5 s", recoverable=True)
    ]
    world.run(30)
    assert d.count(DecodeReleased) == 0
    assert d.handoffs.stats().quarantined == 1
    p.paused = False
    world.run(3)
    assert d.count(DecodeReleased) == 1
    assert p.events == [PrefillReleased(ticket.key, "lease_expired")]
    assert world.settled()
    world.hand_over(p, d)


def test_hello_said_again_keeps_nobody_alive(world: World) -> None:
    """Any listener at the address of a dead engine can repeat it."""
    p, d = Node(world, "P"), Node(world, "D")
    world.begin(p, d, "push")
    p.paused = True
    (session,) = d.handoffs.sessions.servers.values()
    assert session.hello is not None
    for _ in range(round(TIMERS.lease) + 2):
        world.run(1)
        d.handoffs.on_message(session.connection, session.hello)
    assert d.failures() == ["lease_expired"]


def test_a_silent_decode_engine_costs_its_lease_and_frees_nothing_it_may_read(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.ticket(p, d, "pull")
    p.handoffs.open_prefill(ticket)
    world.prefill(p, ticket)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.run(0.1)
    d.paused = True
    world.run(TIMERS.lease + 30)
    assert p.handoffs.stats().lost_leases == 1
    assert p.handoffs.stats().quarantined == 1
    assert p.events == []
    d.paused = False
    world.run(3)
    assert p.events == [PrefillReleased(ticket.key, "lease_expired")]
    assert d.count(DecodeCommitted) + d.count(DecodeReleased) == 1
    assert world.settled()
    # This process slept: the other's silence does not count.
    assert d.handoffs.stats().lost_leases == 0
    world.hand_over(p, d, "pull")


def test_the_memory_of_a_silent_peer_is_let_go_when_nothing_needs_it(world: World, mode: str) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    world.hand_over(p, d, mode)
    assert len(peers_of(p.transport)) == len(peers_of(d.transport)) == 1
    p.paused = True
    world.run(TIMERS.lease + 2)
    assert peers_of(d.transport) == []
    assert d.handoffs.stats().sessions == 0
    p.paused, d.paused = False, True
    world.run(TIMERS.lease + 2)
    assert peers_of(p.transport) == []
    d.paused = False
    world.hand_over(p, d, mode)


def test_a_restarted_prefill_engine_is_met_again(world: World, mode: str) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    world.hand_over(p, d, mode)
    ticket = world.begin(p, d, mode)
    p.die()
    again = Node(world, "P", incarnation="2")
    world.run(2)
    assert d.failures() == ["peer_lost"]
    assert d.count(DecodeReleased) == 1
    world.hand_over(again, d, mode)
    assert ticket.key.prefill_incarnation != again.incarnation
    assert len(peers_of(d.transport)) == 1


def test_a_restarted_decode_engine_is_met_again(world: World, mode: str) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.begin(p, d, mode)
    d.die()
    again = Node(world, "D", incarnation="2")
    world.run(2)
    assert p.events == [PrefillReleased(ticket.key, "peer_lost")]
    world.hand_over(p, again, mode)
    assert len(peers_of(p.transport)) == 1


def test_an_engine_that_never_answers_is_given_up_within_the_lease(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    p.paused = True
    d.handoffs.open_decode(world.ticket(p, d, "push"), N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.run(TIMERS.lease - 1)
    assert d.events == []
    world.run(2)
    assert d.failures() == ["unreachable_peer"]
    # No REGISTER was ever sent, so nothing can write the pages.
    assert d.count(DecodeReleased) == 1
    # P may hold pages for it, and is told as soon as possible; after the ticket has expired D stops dialling.
    assert len(d.handoffs.sessions.servers) == 1
    world.run(100)
    assert d.handoffs.sessions.servers == {}


def test_half_a_handshake_keeps_nobody_alive(world: World) -> None:
    """The dead engine's answer is repeated, or each of its successors dies before the session begins."""
    p, d = Node(world, "P"), Node(world, "D")
    d.handoffs.open_decode(world.ticket(p, d, "push"), N, {"target": Interval(0, N)}, {"target": [3, 4]})
    while not p.sent(Hello):
        world.run(STEP)
    p.paused = True
    (answer,) = [message for _, message in p.channel.sent if isinstance(message, Hello)]
    (session,) = d.handoffs.sessions.servers.values()
    for _ in range(round(TIMERS.lease) + 2):
        d.handoffs.on_message(session.connection, answer)
        world.run(1)
        assert session.hello is None
    assert d.failures() == ["unreachable_peer"]
    assert d.handoffs.stats().rejected == 0


def test_an_engine_that_comes_late_hears_that_the_attempt_is_over(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    p.paused = True
    ticket = world.ticket(p, d, "push")
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.run(TIMERS.lease + 1)
    p.paused = False
    world.run(TIMERS.lease + 1)
    p.handoffs.open_prefill(ticket)
    assert p.events == [PrefillReleased(ticket.key, "unreachable_peer")]


def test_an_address_that_cannot_be_dialled_ends_the_attempt(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")

    def refuse(address: str) -> Connection:
        raise ProtocolError(f"cannot dial {address}")

    d.channel.dial = refuse  # type: ignore[method-assign]
    d.handoffs.open_decode(world.ticket(p, d, "push"), N, {"target": Interval(0, N)}, {"target": [3, 4]})
    assert d.failures() == ["unreachable_peer"]
    assert d.count(DecodeReleased) == 1


def test_a_lease_is_as_long_as_its_engine_says(world: World) -> None:
    p, d = Node(world, "P", Timers(lease=30)), Node(world, "D")
    world.begin(p, d, "push")
    world.run(1)
    p.paused = True
    world.run(28)
    assert d.failures() == []
    world.run(4)
    assert d.failures() == ["lease_expired"]


def test_repetition_begins_at_the_round_trip_and_slows_down(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    world.hand_over(p, d)
    world.run(5)
    d.channel.sent.clear()
    # P computes for a long time, so REGISTER gets no answer soon.
    world.begin(p, d, "push")
    world.run(10)
    times = d.sent(Register)
    gaps = np.diff(times)
    assert gaps[0] <= 0.85
    assert max(gaps) <= TIMERS.retry + 2 * STEP
    assert list(gaps) == sorted(gaps) or max(gaps) - gaps[-1] <= 2 * STEP
    assert 8 <= len(times) <= 20


def test_a_heartbeat_needs_a_session(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    stranger = d.channel.dial(p.address)
    d.channel.send(stranger, Renew(5.0, 1))
    world.run(0.2)
    assert p.sent(Renew) == []
    assert p.handoffs.stats().sessions == 0


def test_a_forgotten_attempt_is_quiet(world: World) -> None:
    """P asks about an attempt that D has forgotten: D has no read of it, and must say so."""
    p, d = Node(world, "P", replace(TIMERS, handoff=20.0)), Node(world, "D")
    ticket = world.ticket(p, d, "pull", life=20)
    p.handoffs.open_prefill(ticket)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.run(0.5)
    # As if D's last message was lost, and D forgot the attempt with the ticket.
    d.handoffs.runner.decodes.live.clear()
    world.prefill(p, ticket)
    world.run(15)
    assert p.events == []
    world.run(10)
    assert p.events == [PrefillReleased(ticket.key, "handoff_timeout")]
    assert world.settled()


def test_a_prefill_engine_that_sleeps_past_the_ticket_still_hears_that_its_reader_is_done(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.ticket(p, d, "pull", life=20)
    p.handoffs.open_prefill(ticket)
    world.prefill(p, ticket)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.run(3 * STEP)
    p.paused = True
    world.run(60)
    assert d.handoffs.stats().outstanding == 0
    p.paused = False
    world.run(10)
    assert p.count(PrefillReleased) == 1
    assert world.settled()


def test_a_successor_cannot_say_that_the_dead_are_quiet(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.begin(p, d, "push")
    attempt = d.handoffs.runner.decodes.live[ticket.key]
    # As with a network adapter that keeps writing for a dead process.
    attempt.peer.is_fenced = lambda: False  # type: ignore[union-attr]
    p.die()
    again = Node(world, "P", incarnation="2")
    world.run(2)
    assert d.failures() == ["peer_lost"]
    again.handoffs.sessions.say_bye("engine_closed", quiet=True)
    world.run(1)
    assert d.count(DecodeReleased) == 0
    attempt.peer.is_fenced = lambda: True  # type: ignore[union-attr]
    world.run(1)
    assert d.count(DecodeReleased) == 1


def test_pages_with_an_unknown_copy_stay_until_the_fence(world: World, mode: str) -> None:
    p, d = Node(world, "P", stuck=mode == "push"), Node(world, "D", stuck=mode == "pull")
    issuer, other = (p, d) if mode == "push" else (d, p)
    ticket = world.begin(p, d, mode)
    world.prefill(p, ticket)
    world.run(0.5)
    issuer.handoffs.abort(ticket.key, "gone")
    world.run(60)
    for node in (p, d):
        assert node.count(PrefillReleased) + node.count(DecodeReleased) == 0
        assert node.handoffs.stats().quarantined == 1
    assert issuer.handoffs.stats().unknown == 1
    assert isinstance(issuer.transport, StuckTransport)
    issuer.transport.hold = True
    other.die()
    world.run(1)
    if mode == "pull":
        # The dead peer writes nothing here, but our own read may.
        assert issuer.count(DecodeReleased) == 0
        for operation in issuer.transport.stuck:
            operation.end("the connection is closed")
        world.run(1)
    assert issuer.count(PrefillReleased) + issuer.count(DecodeReleased) == 1
    stats = issuer.handoffs.stats()
    assert stats.unknown == stats.quarantined == stats.outstanding == 0


def test_an_attempt_without_a_session_does_not_spin(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    p.paused = True
    p.handoffs.open_prefill(world.ticket(p, d, "push"))
    d.handoffs.open_decode(world.ticket(p, d, "push"), N, {"target": Interval(0, N)}, {"target": [3, 4]})
    for node in (p, d):
        waits = []
        for _ in range(5):
            waits.append(node.handoffs.run_timers())
            world.clock.now += waits[-1]
        assert min(waits[1:]) >= TIMERS.retry_min / 2


def test_a_fence_closes_the_connection_which_ends_own_reads(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D", stuck=True)
    ticket = world.begin(p, d, "pull")
    world.prefill(p, ticket)
    world.run(0.5)
    d.handoffs.abort(ticket.key, "gone")
    world.run(1)
    assert d.count(DecodeReleased) == 0
    p.die()
    world.run(1)
    assert d.count(DecodeReleased) == 1


def test_every_connection_with_the_reader_must_be_fenced(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D", stuck=True)
    ticket = world.begin(p, d, "pull")
    world.prefill(p, ticket)
    world.run(0.5)
    # D finds its connection broken and opens a new session; P's end of the old one breaks later.
    (lost,) = d.handoffs.sessions.servers.values()
    d.handoffs.sessions.hang_up(lost)
    d.handoffs.sessions.dial(p.address, lost)
    world.run(0.5)
    attempt = p.handoffs.runner.prefills.live[ticket.key]
    old, new = attempt.peers
    old.is_fenced = lambda: True  # type: ignore[attr-defined]
    p.handoffs.abort(ticket.key, "gone")
    d.paused = True
    world.run(2)
    assert p.count(PrefillReleased) == 0
    new.is_fenced = lambda: True  # type: ignore[attr-defined]
    new.is_alive = lambda: False  # type: ignore[attr-defined]
    world.run(1)
    assert p.count(PrefillReleased) == 1


def test_a_broken_connection_to_a_living_process_is_made_anew(world: World) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.begin(p, d, "push")
    (session,) = d.handoffs.sessions.servers.values()
    session.peer.is_alive = lambda: False  # type: ignore[union-attr]
    world.run(2)
    assert d.failures() == ["peer_lost"]
    # P's message in the new session frees the pages.
    assert d.count(DecodeReleased) == 1
    assert p.events == [PrefillReleased(ticket.key, "peer_lost")]
    world.hand_over(p, d)


def test_copies_go_on_only_where_the_peer_asked_for_them(world: World) -> None:
    """D ends an attempt by the fence of its connection, and redials: P must not write through the new connection."""
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.begin(p, d, "push")
    used: list[Peer] = []
    submit = p.transport.submit

    def spy(peer: Peer, *rest: Any) -> Operation:
        used.append(peer)
        return submit(peer, *rest)

    p.transport.submit = spy  # type: ignore[assignment, method-assign]
    send = d.channel.send
    lost = (Cancel, Cancelled)
    d.channel.send = lambda c, m: None if isinstance(m, lost) else send(c, m)  # type: ignore[method-assign]
    (session,) = d.handoffs.sessions.servers.values()
    session.peer.is_alive = lambda: False  # type: ignore[union-attr]
    session.peer.is_fenced = lambda: True  # type: ignore[union-attr]
    world.run(2)
    assert d.count(DecodeReleased) == 1
    attempt = p.handoffs.runner.prefills.live[ticket.key]
    old, new = attempt.peers
    world.prefill(p, ticket)
    world.run(0.5)
    assert used == [old]
    assert new.alive()


def test_a_fence_is_not_taken_for_the_death_of_the_process(world: World) -> None:
    """D's end of the connection is closed, its last message and all answers are lost, and it forgets the attempt."""
    p, d = Node(world, "P"), Node(world, "D", stuck=True)
    ticket = world.ticket(p, d, "pull", life=4)
    p.handoffs.open_prefill(ticket)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.prefill(p, ticket)
    world.run(0.5)
    to_p, to_d = d.channel.send, p.channel.send
    d.channel.send = lambda c, m: None if isinstance(m, Cancelled) else to_p(c, m)  # type: ignore[method-assign]
    p.channel.send = lambda c, m: None  # type: ignore[method-assign]
    (session,) = d.handoffs.sessions.servers.values()
    session.peer.is_alive = lambda: False  # type: ignore[union-attr]
    session.peer.is_fenced = lambda: True  # type: ignore[union-attr]
    world.run(70)
    assert d.count(DecodeReleased) == 1
    assert not d.handoffs.runner.decodes.ended
    assert p.count(PrefillReleased) == 0
    d.channel.send, p.channel.send = to_p, to_d  # type: ignore[method-assign]
    world.run(3)
    assert p.count(PrefillReleased) == 1
    assert world.settled()


def test_a_process_that_is_proven_dead_is_not_called_again(world: World) -> None:
    """Each connection attempt costs descriptors, for as long as its attempts could have lived."""
    p, d = Node(world, "P"), Node(world, "D")
    world.begin(p, d, "push")
    (session,) = d.handoffs.sessions.servers.values()
    for what in ("is_fenced", "is_dead"):
        setattr(session.peer, what, lambda: True)
    session.peer.is_alive = lambda: False  # type: ignore[union-attr]
    world.run(2)
    assert d.failures() == ["peer_lost"]
    assert d.count(DecodeReleased) == 1
    assert not d.handoffs.sessions.servers

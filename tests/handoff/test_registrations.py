"""Every claim must show the ticket of its attempt, however often it is repeated and whatever came before."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.protocol.ticket import SignedTicket, sign_ticket
from baton.kv.interval import Interval
from testkit.handoffs.modelled_network import N, Node, World

KEY = msg.AttemptKey(b"0" * 16, 0, "p", "d")
WHOLE = {"target": Interval(0, N)}
PAGES = {"target": [3, 4]}
FOREIGN = {"target": [9, 10]}
Mode = Literal["push", "pull"]
MODES = pytest.mark.parametrize("mode", ["push", "pull"])


def register(key: msg.AttemptKey, ticket: str, mode: str, pages: dict[str, list[int]] = PAGES) -> msg.Register:
    return msg.Register(key, ticket, WHOLE, pages if mode == "push" else {})


@MODES
@pytest.mark.parametrize("before", ["nothing", "announced", "registered"])
def test_a_machine_takes_no_claim_with_another_ticket(mode: Mode, before: str) -> None:
    p = PrefillHandoff(KEY, mode, "t", ["target"])
    p.handle(ev.Opened())
    if before != "nothing":
        p.handle(ev.Received(msg.Announce(KEY, "t")))
    if before == "registered":
        p.handle(ev.Received(register(KEY, "t", mode)))
    for forged in (msg.Announce(KEY, "other"), register(KEY, "other", mode, FOREIGN)):
        with pytest.raises(ProtocolError, match="ticket"):
            p.handle(ev.Received(forged))
    assert p.claimed is (before != "nothing")
    assert p.registered is (before == "registered")
    actions = p.handle(ev.Received(register(KEY, "t", mode)))
    actions += p.handle(ev.Declared(N, {"target": [1, 2]}, {"target": N}))
    assert [a.dest_pages for a in actions if isinstance(a, ev.StartCopy)] == ([[3, 4]] if mode == "push" else [])


@MODES
def test_claims_for_an_ended_handoff_are_cancelled(mode: Mode) -> None:
    p = PrefillHandoff(KEY, mode, "t", ["target"])
    for event in (ev.Opened(), ev.Received(msg.Announce(KEY, "t")), ev.Abort("gone")):
        p.handle(event)
    for claim in (msg.Announce(KEY, "other"), register(KEY, "other", mode)):
        assert p.handle(ev.Received(claim)) == [ev.Send(msg.Cancelled(KEY, "gone"))]


@MODES
@pytest.mark.parametrize("when", ["announced", "registered"])
def test_a_forged_claim_of_an_attempt_under_way_costs_it_nothing(world: World, mode: Mode, when: str) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    ticket, other = world.ticket(p, d, mode), world.ticket(p, d, mode)
    p.handoffs.open_prefill(ticket)
    d.handoffs.announce_decode(ticket)
    world.run(0.5)
    if when == "registered":
        d.handoffs.open_decode(ticket, N, WHOLE, PAGES)
        world.run(0.5)
    (session,) = d.handoffs.sessions.servers.values()
    for forged in (msg.Announce(ticket.key, other.text), register(ticket.key, other.text, mode, FOREIGN)):
        d.channel.send(session.connection, forged)
    world.run(0.5)
    assert p.handoffs.stats().rejected == 2
    assert p.sent(msg.Nack) == []
    p.handoffs.admit_prefill(ticket.key)
    p.memory[:] = 7
    world.prefill(p, ticket)
    if when == "announced":
        d.handoffs.open_decode(ticket, N, WHOLE, PAGES)
    world.run(1)
    assert d.count(ev.DecodeCommitted) == 1
    page = d.memory.size // 16
    assert [int(d.memory[i * page]) for i in (3, 4, 9, 10)] == [7, 7, 0, 0]


def test_a_claim_that_waits_vouches_for_no_other_ticket(world: World) -> None:
    """The later attempt waits until the earlier one is quiet; a REGISTER for it meanwhile must show its own ticket."""
    p, d = Node(world, "P", stuck=True), Node(world, "D")
    first = world.begin(p, d, "push")
    world.prefill(p, first)
    world.run(0.5)
    second = msgspec.structs.replace(first, attempt=1)
    second = SignedTicket.of(second, sign_ticket(b"k", second))
    d.handoffs.announce_decode(second)
    world.run(0.5)
    assert p.handoffs.routing.registrations.holding
    (session,) = d.handoffs.sessions.servers.values()
    d.channel.send(session.connection, register(second.key, first.text, "push"))
    world.run(0.2)
    assert d.failures() == ["superseded", "register_refused"]


@pytest.mark.parametrize("first", ["P", "D"])
def test_two_tickets_for_one_attempt_end_it(world: World, first: str) -> None:
    """As from a router that begins a request twice: D's ticket may be for another prompt."""
    p, d = Node(world, "P"), Node(world, "D")
    ticket = world.ticket(p, d, "push")
    twin = msgspec.structs.replace(ticket, request_digest=bytes(range(32)))
    twin = SignedTicket.of(twin, sign_ticket(b"k", twin))
    assert twin.key == ticket.key
    if first == "P":
        p.handoffs.open_prefill(ticket)
    d.handoffs.open_decode(twin, N, WHOLE, PAGES)
    world.run(0.5)
    if first == "D":
        p.handoffs.open_prefill(ticket)
    world.prefill(p, ticket)
    world.run(1)
    assert d.failures() == ["register_refused"]
    assert d.count(ev.DecodeReleased) == 1
    assert d.count(ev.DecodeCommitted) == 0
    if first == "P":
        # The client has the answer of P's leg, and P waits no longer than for any other missing D.
        world.run(110)
    assert p.count(ev.PrefillReleased) == 1
    assert world.settled()


@pytest.mark.parametrize("claim", ["announce", "register"])
def test_a_claim_of_an_earlier_attempt_than_the_last_is_refused(world: World, claim: str) -> None:
    p, d = Node(world, "P"), Node(world, "D")
    first = world.ticket(p, d, "push")
    second = msgspec.structs.replace(first, attempt=1)
    second = SignedTicket.of(second, sign_ticket(b"k", second))
    p.handoffs.open_prefill(second)
    d.handoffs.announce_decode(second)
    world.run(0.5)
    (session,) = d.handoffs.sessions.servers.values()
    late = msg.Announce(first.key, first.text) if claim == "announce" else register(first.key, first.text, "push")
    d.channel.send(session.connection, late)
    world.run(0.5)
    assert p.handoffs.stats().rejected == 1
    assert list(p.handoffs.runner.prefills.live) == [second.key]

"""A handoff waits for P's pages, then for D's, before REGISTER, and no such wait ends by a timeout."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.decode import DecodeHandoff
from baton.handoff.protocol.prefill import PrefillHandoff
from baton.handoff.protocol.ticket import SignedTicket, sign_ticket
from baton.kv.interval import Interval
from testkit.handoffs.modelled_network import TIMERS as CALM
from testkit.handoffs.modelled_network import Node as Engine
from testkit.handoffs.modelled_network import World
from testkit.handoffs.nodes import SEEDS, Pair, settle, ticket_for

KEY = msg.AttemptKey(b"0" * 16, 0, "p", "d")
WANTED = {"target": Interval(2, 8), "draft": Interval(7, 8)}
TABLES = {"draft": [3, 4], "target": [8, 9]}
ANNOUNCE = msg.Announce(KEY, "t")
MODES = pytest.mark.parametrize("mode", ["push", "pull"])
Mode = Literal["push", "pull"]
N = 8
TIMERS = replace(CALM, handoff=20.0)


def engine(world: World, name: str) -> Engine:
    return Engine(world, name, TIMERS)


def announced(mode: Mode) -> DecodeHandoff:
    d = DecodeHandoff(KEY, mode, "t")
    assert d.handle(ev.Tick()) == []
    assert d.handle(ev.PeerReady()) == [ev.Send(ANNOUNCE)] == d.handle(ev.Tick())
    return d


def prefill(mode: Mode, *events: ev.MachineEvent) -> PrefillHandoff:
    p = PrefillHandoff(KEY, mode, "t", list(WANTED))
    for event in events:
        p.handle(event)
    return p


# ---------------------------------------------------------------- the state machines


@MODES
def test_d_registers_when_it_was_admitted_and_has_pages(mode: Mode) -> None:
    d = announced(mode)
    assert d.handle(ev.Received(msg.Admitted(KEY))) == [ev.Notify(ev.DecodeAdmitted(KEY))]
    assert d.handle(ev.Received(msg.Admitted(KEY))) == []
    assert d.handle(ev.Tick()) == [ev.Send(ANNOUNCE)], "P is to know that D waits for pages of its own"
    register = msg.Register(KEY, ticket="t", wanted=WANTED, pages=TABLES if mode == "push" else {})
    assert d.handle(ev.Placed(WANTED, TABLES)) == [ev.Send(register)] == d.handle(ev.Tick())
    assert d.handle(ev.Received(msg.Admitted(KEY))) == [], "a late one"


@MODES
@pytest.mark.parametrize("first", ["announced", "admitted"])
def test_p_says_admitted_in_either_order_and_again(mode: Mode, first: str) -> None:
    p = prefill(mode, ev.Opened())
    came, room = ev.Received(ANNOUNCE), ev.PagesGiven()
    said = [ev.Send(msg.Admitted(KEY))]
    before, after = (came, room) if first == "announced" else (room, came)
    assert p.handle(before) == []
    assert p.handle(after) == said == p.handle(came)
    assert p.handle(ev.Tick()) == [], "D asks"


@MODES
def test_a_refused_leg_is_told_to_whoever_waits_for_it(mode: Mode) -> None:
    p = prefill(mode, ev.Opened(), ev.Received(ANNOUNCE))
    assert p.handle(ev.Abort("failed"))[:2] == [
        ev.Send(msg.Cancel(KEY, "failed")),
        ev.Send(msg.Cancelled(KEY, "failed")),
    ]
    assert p.handle(ev.Received(ANNOUNCE)) == [ev.Send(msg.Cancelled(KEY, "failed"))]
    d = announced(mode)
    told = d.handle(ev.Received(msg.Cancel(KEY, "failed")))
    assert told == [ev.Notify(ev.DecodeFailed(KEY, "failed", "", recoverable=True))]
    assert ev.Notify(ev.DecodeReleased(KEY)) in d.handle(ev.Received(msg.Cancelled(KEY, "failed")))


@MODES
def test_p_hears_of_a_leg_that_gives_up_while_it_waits(mode: Mode) -> None:
    d = announced(mode)
    cancel = [ev.Send(msg.Cancel(KEY, "gone"))]
    assert d.handle(ev.Abort("gone")) == cancel == d.handle(ev.Tick()), "said until it is answered"
    assert d.handle(ev.Placed(WANTED, TABLES)) == [], "the engine's call crossed it: P never heard of these pages"
    assert d.handle(ev.Received(msg.Cancelled(KEY, "gone")))[-1] == ev.Notify(ev.DecodeReleased(KEY))
    assert d.closed


@MODES
def test_a_request_that_ends_with_its_first_token_takes_no_pages(mode: Mode) -> None:
    p = prefill(mode, ev.Opened(), ev.Received(ANNOUNCE), ev.PagesGiven())
    finished = ev.Send(msg.Finished(KEY, SEEDS))
    assert finished in p.handle(ev.Sampled(SEEDS, True, {}))
    assert p.handle(ev.Received(ANNOUNCE)) == [finished]
    d = announced(mode)
    assert d.handle(ev.Received(finished.message)) == [
        ev.Send(msg.Ack(KEY)),
        ev.Notify(ev.DecodeFinished(KEY, SEEDS)),
    ]
    assert d.handle(ev.Placed(WANTED, TABLES)) == []
    late = prefill(mode, ev.Opened(), ev.PagesGiven(), ev.Sampled(SEEDS, True, {}))
    assert late.handle(ev.Received(ANNOUNCE)) == [finished]


@MODES
def test_an_attempt_that_is_over_answers_whatever_is_asked(mode: Mode) -> None:
    p = prefill(mode, ev.Opened(), ev.Received(ANNOUNCE), ev.Abort("engine_closed"))
    for question in (msg.ReadDone(KEY), msg.Repair(KEY, 1, {}), ANNOUNCE):
        assert p.handle(ev.Received(question)) == [ev.Send(msg.Cancelled(KEY, "engine_closed"))]


# ---------------------------------------------------------------- engines in modelled time


@MODES
def test_a_wait_outlasts_the_ticket(world: World, mode: Mode) -> None:
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, mode, life=10)
    p.handoffs.open_prefill(ticket)
    d.handoffs.announce_decode(ticket)
    world.run(40)
    p.handoffs.admit_prefill(ticket.key)
    world.run(0.2)
    assert d.events == [ev.DecodeAdmitted(ticket.key)]
    world.prefill(p, ticket)
    world.run(40)
    assert p.events == [], "its pages wait for D's"
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.run(1)
    assert p.events == [ev.PrefillReleased(ticket.key, "committed")]
    assert d.count(ev.DecodeCommitted) == 1
    assert world.settled()


def test_a_leg_that_no_engine_takes_ends_with_its_ticket(world: World) -> None:
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, "push", life=10)
    d.handoffs.announce_decode(ticket)
    world.run(9)
    assert d.events == []
    world.run(3)
    assert d.failures() == ["handoff_timeout"]
    assert d.events[0].recoverable  # type: ignore[union-attr]
    assert world.settled()
    assert p.events == []


@MODES
def test_time_counts_from_register(world: World, mode: Mode) -> None:
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, mode, life=10)
    p.handoffs.open_prefill(ticket)
    d.handoffs.announce_decode(ticket)
    p.handoffs.admit_prefill(ticket.key)
    world.run(30)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
    world.run(TIMERS.handoff - 1)
    assert d.failures() == []
    world.run(2)
    assert d.failures() == ["handoff_timeout"]
    assert world.settled()


def admitted_long_after_register(world: World, mode: Mode) -> tuple[Engine, Engine, SignedTicket]:
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, mode)
    p.handoffs.open_prefill(ticket)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]}, admitted=False)
    world.run(2 * TIMERS.handoff)
    p.handoffs.admit_prefill(ticket.key)
    return p, d, ticket


@MODES
def test_pages_that_came_early_wait_for_admission_without_a_limit(world: World, mode: Mode) -> None:
    p, d, ticket = admitted_long_after_register(world, mode)
    world.run(TIMERS.handoff - 1)
    assert (p.events, d.events) == ([], [])
    world.prefill(p, ticket)
    world.run(1)
    assert d.count(ev.DecodeCommitted) == 1
    assert world.settled()


@MODES
def test_time_counts_from_an_admission_after_register(world: World, mode: Mode) -> None:
    p, d, ticket = admitted_long_after_register(world, mode)
    world.run(TIMERS.handoff + 1)
    assert p.events == [ev.PrefillReleased(ticket.key, "handoff_timeout")]
    assert d.failures() == ["handoff_timeout"]
    assert world.settled()


def test_a_read_that_came_early_has_a_limit(world: World) -> None:
    p, d = Engine(world, "P", CALM), Engine(world, "D", TIMERS, stuck=True)
    ticket = world.ticket(p, d, "pull")
    p.handoffs.open_prefill(ticket)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]}, admitted=False)
    world.run(2 * TIMERS.handoff)
    world.prefill(p, ticket)
    world.run(TIMERS.handoff - 1)
    assert d.failures() == []
    world.run(2)
    assert d.failures() == ["handoff_timeout"]


@pytest.mark.parametrize("admitted", ["before", "after"])
def test_an_announced_leg_may_get_pages_before_p_answers(world: World, admitted: str) -> None:
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, "push")
    p.handoffs.open_prefill(ticket)
    d.handoffs.announce_decode(ticket)
    if admitted == "before":
        p.handoffs.admit_prefill(ticket.key)
    world.run(1)
    d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]}, admitted=False)
    world.run(TIMERS.handoff + 1)
    assert d.failures() == (["handoff_timeout"] if admitted == "before" else [])


def test_p_keeps_no_pages_for_a_leg_that_fell_silent(world: World) -> None:
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, "pull", life=10)
    p.handoffs.open_prefill(ticket)
    d.handoffs.announce_decode(ticket)
    p.handoffs.admit_prefill(ticket.key)
    world.prefill(p, ticket)
    world.run(15)
    # D's session lives, but it no longer knows this attempt.
    d.handoffs.runner.decodes.live.clear()
    world.run(TIMERS.handoff + 2)
    assert p.events == [ev.PrefillReleased(ticket.key, "handoff_timeout")]


def test_p_says_that_it_has_forgotten_an_attempt(world: World) -> None:
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, "pull", life=10)
    d.handoffs.announce_decode(ticket)
    world.run(0.5)
    p.handoffs.runner.prefills.live.clear()
    session = next(iter(d.handoffs.sessions.servers.values()))
    for question in (msg.ReadDone(ticket.key), msg.Repair(ticket.key, 1, {})):
        d.channel.send(session.connection, question)
    world.run(0.5)
    assert d.failures() == ["forgotten"]
    assert world.settled()


def test_d_shows_the_ticket_as_it_came_and_signs_none(world: World) -> None:
    """P refuses an invalid signature, although D knows the key."""
    p, d = engine(world, "P"), engine(world, "D")
    ticket = world.ticket(p, d, "push")
    d.handoffs.announce_decode(SignedTicket.of(ticket, sign_ticket(b"another key", ticket)))
    world.run(0.5)
    assert d.failures() == ["register_refused"]


@pytest.mark.parametrize("claim", ["announce", "register"])
def test_a_claim_that_cancel_overtook_starts_nothing(world: World, claim: str) -> None:
    p, d = engine(world, "P"), engine(world, "D")
    d.handoffs.announce_decode(world.ticket(p, d, "push"))
    world.run(0.5)
    ticket = world.ticket(p, d, "push")
    (session,) = d.handoffs.sessions.servers.values()
    late: msg.AttemptMessage = msg.Announce(ticket.key, sign_ticket(b"k", ticket))
    if claim == "register":
        late = msg.Register(ticket.key, sign_ticket(b"k", ticket), {"target": Interval(0, N)}, {"target": [3, 4]})
    for message in (msg.Cancel(ticket.key, "gone"), late):
        d.channel.send(session.connection, message)
    world.run(0.5)
    p.handoffs.open_prefill(ticket)
    world.prefill(p, ticket)
    world.run(0.5)
    assert p.events == [ev.PrefillReleased(ticket.key, "gone")]
    assert not len(p.handoffs.operations)


# ---------------------------------------------------------------- complete agents


@MODES
def test_two_steps_over_real_sockets(pair: Pair, mode: Mode) -> None:
    p, d = pair.both()
    ticket = ticket_for(p, d, mode)
    with pytest.raises(ProtocolError, match="another engine"):
        p.agent.announce_decode(ticket)
    d.agent.announce_decode(ticket)
    p.agent.open_prefill(ticket)
    p.agent.admit_prefill(ticket.key)
    d.next(ev.DecodeAdmitted)
    source, dest = p.pages(1, N), d.pages(3, N)
    p.agent.declare_final(ticket.key, N, source, {"target": N, "draft": N - 1})
    p.agent.finish_prefill(ticket.key, SEEDS, False, {"draft": N})
    d.agent.open_decode(ticket, N, {"target": Interval(0, N), "draft": Interval(0, N)}, dest)
    d.next(ev.DecodeCommitted)
    assert p.next(ev.PrefillReleased) == ev.PrefillReleased(ticket.key, "committed")
    settle(p, d)


def test_pages_of_an_announced_leg_are_checked_too(pair: Pair) -> None:
    p, d = pair.both()
    ticket = ticket_for(p, d, "push")
    d.agent.announce_decode(ticket)
    p.agent.open_prefill(ticket)
    p.agent.admit_prefill(ticket.key)
    d.next(ev.DecodeAdmitted)
    d.agent.open_decode(
        ticket, N, {"target": Interval(0, N), "draft": Interval(0, 4)}, {"target": [3, 9999], "draft": [1]}
    )
    failed = d.next(ev.DecodeFailed)
    assert isinstance(failed, ev.DecodeFailed)
    assert failed.reason == "register_refused"
    d.next(ev.DecodeReleased)
    settle(p, d)

"""The joined agents of many ranks, over agents that only record calls."""

from __future__ import annotations

import threading

import msgspec
import pytest

from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.leg_events import DecodeLeg, GiveUp, LegEvent, PrefillLeg
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Pair, Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket, sign_ticket, verify_ticket
from baton.testing import RecordingAgent
from baton.wire import HandoffParams
from testkit.handoffs.ranks import Shape, wanted_of
from testkit.inside import legs_of

KEY = b"k" * 32
TWO = Shape(tp=2)


def noting(noted: list[tuple[type[LegEvent], bytes, Pair]]) -> RecordingAgent:
    """One rank's agent. `noted`: events of all ranks, with their transfer and pair."""
    return RecordingAgent(lambda key, event: noted.append((type(event), key.transfer_id, key.pair)))


class OfTwo:
    def __init__(self) -> None:
        self.noted: list[tuple[type[LegEvent], bytes, Pair]] = []
        self.events: list[ev.HandoffEvent] = []
        self.agent = InstanceAgent(TWO.instance(0), self.events.append)
        self.agent.bind([noting(self.noted) for _ in range(2)])

    def pairs(self, ticket: Ticket) -> set[Pair]:
        return {pair for _, transfer, pair in self.noted if transfer == ticket.transfer_id}


def ticket_of(number: int, num_sources: int = 2, host: str = "p") -> SignedTicket:
    return SignedTicket(
        transfer_id=bytes([number]) * 16,
        prefill_engine="P",
        prefill_incarnation="p",
        prefill_addresses=[f"tcp://{host}:{port}" for port in range(num_sources)],
        decode_engine="D",
        decode_incarnation="d",
        decode_addresses=["tcp://d:0", "tcp://d:1"],
        mode="push",
        prefill_expiry=1.0,
        decode_expiry=1.0,
        request_digest=bytes(32),
        text="",
    )


def test_pages_that_come_after_the_end_begin_nothing_anew() -> None:
    """The engine may place a request whose end it does not know yet: a new attempt would never be ended."""
    d, ticket, other = OfTwo(), ticket_of(1), ticket_of(2)
    d.agent.announce_decode(ticket)
    d.agent.on_event(ev.DecodeFailed(ticket.key, "peer_lost", "", True))
    d.agent.on_event(ev.DecodeReleased(ticket.key))
    d.agent.announce_decode(other)
    d.agent.on_peer(other.key, TWO.instance(0))
    d.agent.open_decode(ticket, 5, wanted_of(5, 0), {})
    assert d.pairs(ticket) == {(0, 0), (1, 0)}  # whose tombstones take no pages
    assert d.noted[1:3] == [(what, ticket.transfer_id, (1, 0)) for what in (DecodeLeg, GiveUp)]  # P's may be apart
    assert d.pairs(other) == {(0, 0), (1, 1)}
    assert set(legs_of(d.agent)) == {other.key}
    assert [type(event) for event in d.events] == [ev.DecodeFailed, ev.DecodeReleased]


def test_a_rank_that_is_apart_asks_only_the_leading_rank_after_the_end() -> None:
    """P may have fewer ranks than D: there is no rank of P with this one's number."""
    noted: list[tuple[type[LegEvent], bytes, Pair]] = []
    here = msgspec.structs.replace(TWO.instance(1), apart=True)
    agent, ticket = InstanceAgent(here, lambda event: None), ticket_of(1, num_sources=1)
    agent.bind([noting(noted)])
    agent.announce_decode(ticket)
    agent.on_event(ev.DecodeFailed(ticket.key.of_pair((0, 1)), "peer_lost", "", True))
    agent.on_event(ev.DecodeReleased(ticket.key.of_pair((0, 1))))
    agent.open_decode(ticket, 5, wanted_of(5, 0), {})
    assert [pair for _, _, pair in noted] == [(0, 1), (0, 1)]


def test_the_engine_is_told_without_a_lock() -> None:
    """The engine may wait for another thread that calls the agents; it still gets all events in order."""
    d, ticket, other = OfTwo(), ticket_of(1), ticket_of(2)
    waited: list[bool] = []

    def told(event: ev.HandoffEvent) -> None:
        d.events.append(event)
        if isinstance(event, ev.DecodeFailed):
            d.agent.on_event(ev.DecodeReleased(ticket.key))
            thread = threading.Thread(target=d.agent.announce_decode, args=(other,))
            thread.start()
            thread.join(60.0)
            waited.append(thread.is_alive())
            d.events.append(ev.DecodeAdmitted(other.key))

    d.agent._on_event = told
    d.agent.announce_decode(ticket)
    d.agent.on_event(ev.DecodeFailed(ticket.key, "peer_lost", "", True))
    assert waited == [False]
    assert [type(event) for event in d.events] == [ev.DecodeFailed, ev.DecodeAdmitted, ev.DecodeReleased]


@pytest.mark.parametrize("num_sources", [1, 3])
def test_no_rank_is_sought_that_a_ticket_does_not_name(num_sources: int) -> None:
    """P is known, but the ticket names other ranks: the leading pair, the only one, is refused."""
    d, good, bad = OfTwo(), ticket_of(1), ticket_of(2, num_sources)
    d.agent.announce_decode(good)
    d.agent.on_peer(good.key, TWO.instance(0))
    d.agent.announce_decode(bad)
    assert d.pairs(bad) == {(0, 0)}
    d.agent.on_event(ev.DecodeFailed(bad.key, "incompatible_peer", "", True))
    d.agent.on_event(ev.DecodeReleased(bad.key))
    assert set(legs_of(d.agent)) == {good.key}


def test_a_ticket_of_many_ranks_comes_with_a_request() -> None:
    """As many hosts with long names as are allowed."""
    ticket = ticket_of(1, 64, "engine-0.prefill.some-namespace.svc.cluster.example.com")
    ticket = msgspec.structs.replace(ticket, decode_addresses=ticket.prefill_addresses)
    text = sign_ticket(KEY, ticket)
    params = msgspec.json.decode(msgspec.json.encode(HandoffParams(role="decode", ticket=text)), type=HandoffParams)
    assert verify_ticket(KEY, params.ticket, "decode", 0.0).prefill_addresses == ticket.prefill_addresses


def test_ranks_that_come_after_the_end_are_shown_no_pages() -> None:
    """P's engine was told that the pages are free: another request may have them."""
    events: list[ev.HandoffEvent] = []
    ticket, one = ticket_of(1), Shape()
    p = InstanceAgent(one.instance(0), events.append)
    second = RecordingAgent()
    p.bind([second])
    p.open_prefill(ticket)
    p.admit_prefill(ticket.key)
    p.declare_final(ticket.key, 5, {"target": [1, 2]}, {"target": 5})
    p.finish_prefill(ticket.key, Seeds(7), True, {})
    p.on_event(ev.PrefillReleased(ticket.key, "finished"))
    second.posted.clear()
    p.on_peer(ticket.key, TWO.instance(0))
    assert second.kinds == [PrefillLeg, ev.PagesGiven, ev.Sampled]
    p.on_event(ev.PrefillReleased(ticket.key.of_pair((0, 1)), "finished"))
    assert events == [ev.PrefillReleased(ticket.key, "finished")]
    assert not legs_of(p)


def test_a_claim_before_the_prefill_leg_tells_which_ranks_there_are() -> None:
    """All pairs open with P's leg. If they waited for D to ask again, a request that ends with its first token would
    end only for the leading pair, and D's other ranks would hold their pages until the ticket expires.
    """
    p, ticket = OfTwo(), ticket_of(1)
    p.agent.on_peer(ticket.key, TWO.instance(0))
    assert not p.noted
    p.agent.open_prefill(ticket)
    assert p.pairs(ticket) == {(0, 0), (1, 1)}

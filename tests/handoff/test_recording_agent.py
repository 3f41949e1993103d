"""The public agent for tests: what it records, and whose thread accepts that an attempt is given up."""

from __future__ import annotations

import threading

from baton.handoff.agent.leg_events import GiveUp, PrefillLeg
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.testing import RecordingAgent
from testkit.handoffs.tickets import make_ticket


def test_it_records_events_and_accepts_an_abort_on_another_thread() -> None:
    ticket = SignedTicket.of(make_ticket(), "signed")
    seen: list[type] = []
    agent = RecordingAgent(lambda key, event: seen.append(type(event)))
    taken, threads = threading.Event(), set[int]()

    def accept() -> None:
        threads.add(threading.get_ident())
        taken.set()

    agent.open_prefill(ticket)
    agent.finish_prefill(ticket.key, Seeds(first_token=7), False, {"target": 3})
    agent.abort(ticket.key, "preempted", accept)
    assert taken.wait(60)
    assert threads.isdisjoint({threading.get_ident()})
    assert agent.posted == [
        (ticket.key, PrefillLeg(ticket)),
        (ticket.key, ev.Sampled(Seeds(first_token=7), False, {"target": 3})),
        (ticket.key, GiveUp("preempted")),
    ]
    assert agent.kinds == seen == [PrefillLeg, ev.Sampled, GiveUp]
    assert agent.of(ev.Sampled) == [ev.Sampled(Seeds(first_token=7), False, {"target": 3})]

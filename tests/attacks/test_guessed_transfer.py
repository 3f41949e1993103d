"""Messages about transfers that the sender guessed or overheard, and does not take part in."""

from __future__ import annotations

import msgspec
import pytest

from baton.handoff.protocol.events import DecodeCommitted, PrefillReleased
from baton.handoff.protocol.messages import Ack, AttemptKey, Cancel, Cancelled, Confirm, ReadDone, Repair, Seeds
from baton.handoff.protocol.ticket import Ticket
from baton.kv.interval import Interval
from testkit.inside import rank_handoffs_of
from testkit.waiting import eventually
from tests.attacks.attacker import Scene

TOKENS = 8


def begin(scene: Scene, mode: str = "push") -> Ticket:
    """A handoff in which D waits for the remaining entries."""
    ticket = scene.ticket(mode=mode)
    pages = {"target": [1, 2], "draft": [3, 4]}
    scene.p.agent.open_prefill(ticket)
    scene.p.agent.declare_final(ticket.key, TOKENS, pages, {"target": 4, "draft": 3})
    scene.d.agent.open_decode(ticket, TOKENS, {"target": Interval(0, TOKENS), "draft": Interval(0, TOKENS)}, pages)
    return ticket


def finish(scene: Scene, ticket: Ticket) -> None:
    """The handoff ends as if there had been no attack."""
    scene.p.agent.finish_prefill(ticket.key, Seeds(first_token=1), False, dict.fromkeys(("target", "draft"), TOKENS))
    assert isinstance(scene.d.events.get(timeout=60), DecodeCommitted)
    assert scene.p.events.get(timeout=60) == PrefillReleased(ticket.key, "committed")


def test_guessed_ids_touch_nobody(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    ticket = begin(scene)
    attacker = scene.attacker()
    attacker.join(scene.as_d(engine_id="E", incarnation="E-1"))
    guesses = [AttemptKey(bytes([i]) * 16, 0, scene.p.incarnation, "E-1") for i in range(20)]
    for key in guesses:
        attacker.say(Ack(key), ReadDone(key), Repair(key, round=1, bad={}), Confirm(key, Seeds(first_token=1)))
    eventually(lambda: scene.p.agent.stats().rejected == 2 * len(guesses))
    attacker.hear(Cancelled)  # nothing of these attempts is outstanding
    assert "message for an attempt that is not open here" in caplog.text
    finish(scene, ticket)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_transfer_overheard_cannot_be_ended_by_another(scene: Scene, mode: str) -> None:
    ticket = begin(scene, mode)
    attacker = scene.attacker()
    attacker.join(scene.as_d(engine_id="E", incarnation="E-1"))
    attacker.say(Cancel(ticket.key, "x"), Ack(ticket.key), ReadDone(ticket.key), Cancelled(ticket.key, "x"))
    eventually(lambda: scene.p.agent.stats().rejected == 4)
    # Its own incarnation in the key makes it another attempt, which does not exist.
    mine = msgspec.structs.replace(ticket.key, decode_incarnation="E-1")
    attacker.say(Ack(mine), ReadDone(mine), Cancel(mine, "x"))
    eventually(lambda: scene.p.agent.stats().rejected == 5)
    attacker.hear(Cancelled)
    finish(scene, ticket)


def test_cancelling_guesses_costs_bounded_memory(scene: Scene) -> None:
    """CANCEL of an unknown attempt leaves a tombstone. Strangers' tombstones must not displace those of real
    attempts.
    """
    scene.traffic.serve_one()
    spent, _ = scene.traffic.spent[-1]
    attacker = scene.attacker()
    attacker.join(scene.as_d(engine_id="E", incarnation="E-1"))
    before = scene.p.agent.stats().frames
    for i in range(20_000):
        attacker.say(Cancel(AttemptKey(i.to_bytes(16, "big"), 0, scene.p.incarnation, "E-1"), "x"))
    eventually(lambda: scene.p.agent.stats().frames >= before + 20_000)
    table = rank_handoffs_of(scene.p.agent).runner.prefills
    assert table.get(spent) is not None
    assert len(table.ended) < 10_000

"""A used ticket that is sent again, by anyone, anywhere, at any time."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from baton.errors import ProtocolError, WrongEngineError
from baton.handoff.protocol.messages import Cancelled, Hello, Nack, Register
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, Redeemer, SignedTicket, Ticket, request_digest, sign_ticket
from baton.kv.interval import Interval
from baton.sampling_params import SamplingParams
from testkit.handoffs.tickets import make_ticket
from testkit.waiting import eventually
from tests.attacks.attacker import TICKET_KEY, Scene


def register(ticket: Ticket, key: bytes = TICKET_KEY) -> Register:
    wanted = {"target": Interval(0, 4), "draft": Interval(0, 4)}
    return Register(ticket.key, ticket=sign_ticket(key, ticket), wanted=wanted, pages={"target": [3], "draft": [3]})


def spent_ticket(scene: Scene) -> Register:
    """A REGISTER with the ticket of a handoff that is over."""
    scene.traffic.serve_one()
    key, text = scene.traffic.spent[-1]
    wanted = {"target": Interval(0, 4), "draft": Interval(0, 4)}
    return Register(key, ticket=text, wanted=wanted, pages={"target": [3], "draft": [3]})


def test_the_same_engine_gets_no_second_copy(scene: Scene) -> None:
    replay = spent_ticket(scene)
    before = scene.p.agent.stats()
    pools = {name: pool.copy() for name, pool in scene.d.pools.items()}
    attacker = scene.attacker()
    attacker.join(scene.as_d())
    attacker.say(replay, replay)
    attacker.hear(Cancelled)
    after = scene.p.agent.stats()
    assert (after.bytes, after.runs, after.outstanding) == (before.bytes, before.runs, 0)
    assert scene.p.events.empty()
    assert all((pools[name] == pool).all() for name, pool in scene.d.pools.items())


def test_another_engine_gets_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Neither for a spent ticket nor for a valid one of another engine."""
    attacker = scene.attacker()
    attacker.join(scene.as_d(engine_id="E"))
    for number, what in enumerate((spent_ticket(scene), register(scene.ticket())), start=1):
        attacker.say(what)
        nack = attacker.hear(Nack)
        assert isinstance(nack, Nack)
        assert nack.message == "the ticket names another decode engine"
        eventually(lambda number=number: scene.p.agent.stats().rejected == number)
    assert caplog.text.count("the ticket names another decode engine") == 2
    other = scene.attacker()
    other.join(scene.as_d(incarnation="D-after-restart"))
    other.say(spent_ticket(scene))
    eventually(lambda: "message for an attempt of other engines" in caplog.text)
    assert scene.p.agent.stats().outstanding == 0


def test_a_restarted_prefill_engine_knows_no_old_ticket(scene: Scene) -> None:
    replay = spent_ticket(scene)
    again = scene.node("P")
    attacker = scene.attacker(again)
    attacker.join(scene.as_d())
    attacker.say(replay)
    eventually(lambda: again.agent.stats().rejected == 1)
    # Not even if the message claims to be for the new process: the ticket says otherwise.
    forged = msgspec.structs.replace(replay.key, prefill_incarnation=again.incarnation)
    attacker.say(msgspec.structs.replace(replay, key=forged))
    nack = attacker.hear(Nack)
    assert isinstance(nack, Nack)
    assert nack.message == "the ticket is for another attempt"


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        ({"prefill_expiry": -1.0}, TICKET_KEY, "ticket has expired"),
        ({"prefill_expiry": MAX_TICKET_LIFE_S + 600.0}, TICKET_KEY, "valid for more than"),
        ({}, b"x" * 32, "signature does not match"),
        ({"prefill_engine": "Q"}, TICKET_KEY, "names another prefill engine"),
    ],
)
def test_tickets_that_were_never_good(
    scene: Scene, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], key: bytes, why: str
) -> None:
    if "prefill_expiry" in changes:
        # Relative to now, not to pytest's collection, which may be long ago.
        changes = {"prefill_expiry": time.monotonic() + changes["prefill_expiry"]}
    attacker = scene.attacker()
    attacker.join(scene.as_d())
    attacker.say(register(scene.ticket(**changes), key))
    nack = attacker.hear(Nack)
    assert isinstance(nack, Nack)
    assert nack.reason == ("ticket_expired" if why == "ticket has expired" else "register_refused")
    assert why in nack.message
    assert why in caplog.text
    assert scene.p.agent.stats().rejected == 1
    assert scene.p.agent.stats().outstanding == 0


@pytest.mark.parametrize("step", [-7200.0, 7200.0])
def test_a_time_of_day_that_is_set_revives_and_refuses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Set back: an old ticket stays old. Set forward, and back again: a new one is valid."""
    expired = register(scene.ticket(prefill_expiry=time.monotonic() - 1.0))
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + step)
    scene.traffic.serve_one()
    attacker = scene.attacker()
    attacker.join(scene.as_d())
    attacker.say(expired)
    assert "ticket has expired" in attacker.hear(Nack).message  # type: ignore[attr-defined]
    monkeypatch.undo()
    scene.traffic.serve_one()


# ---------------------------------------------------------------- requests

PROMPT, PARAMS = [1, 2, 3], SamplingParams(seed=1)
DIGEST = request_digest(PROMPT, PARAMS)
TICKET = make_ticket(prefill_expiry=1100.0, decode_expiry=5100.0, request_digest=DIGEST)


def test_a_ticket_serves_one_request_per_leg() -> None:
    p, d = Redeemer(TICKET_KEY, "P", "P-1"), Redeemer(TICKET_KEY, "D", "D-1")
    text = sign_ticket(TICKET_KEY, TICKET)
    assert p.redeem(text, "prefill", DIGEST, 1000.0) == SignedTicket.of(TICKET, text)
    # Each by its own clock.
    assert d.redeem(text, "decode", DIGEST, 5000.0) == SignedTicket.of(TICKET, text)
    for now in (1000.5, 1099.9):
        with pytest.raises(ProtocolError, match="used before"):
            p.redeem(text, "prefill", DIGEST, now)
    # Forgotten when it expires; from then on its expiry refuses it.
    with pytest.raises(ProtocolError, match="expired"):
        p.redeem(text, "prefill", DIGEST, 1100.0)
    assert p._used == {}
    assert (p.refused, d.refused) == (3, 0)


@pytest.mark.parametrize(
    ("role", "engine", "incarnation", "digest", "why"),
    [
        ("decode", "P", "P-1", DIGEST, "another engine"),
        ("prefill", "P", "P-2", DIGEST, "another engine"),
        ("prefill", "Q", "P-1", DIGEST, "another engine"),
        ("prefill", "P", "P-1", request_digest([1, 2, 4], PARAMS), "another request"),
        ("prefill", "P", "P-1", request_digest(PROMPT, SamplingParams(seed=2)), "another request"),
        ("prefill", "P", "P-1", request_digest(PROMPT, PARAMS, len(PROMPT) - 1), "another request"),
    ],
)
def test_a_ticket_serves_only_what_it_was_signed_for(
    role: str, engine: str, incarnation: str, digest: bytes, why: str
) -> None:
    redeemer = Redeemer(TICKET_KEY, engine, incarnation)
    with pytest.raises(ProtocolError, match=why) as refused:
        redeemer.redeem(sign_ticket(TICKET_KEY, TICKET), role, digest, 1000.0 if role == "prefill" else 5000.0)  # type: ignore[arg-type]
    assert isinstance(refused.value, WrongEngineError) == (why == "another engine")
    assert redeemer.refused == 1
    assert redeemer._used == {}


def test_used_tickets_take_bounded_memory() -> None:
    redeemer = Redeemer(TICKET_KEY, "P", "P-1")
    for now in range(1000, 3000):
        ticket = msgspec.structs.replace(TICKET, transfer_id=now.to_bytes(16, "big"), prefill_expiry=now + 120.0)
        redeemer.redeem(sign_ticket(TICKET_KEY, ticket), "prefill", DIGEST, float(now))
    assert len(redeemer._used) <= 121


def test_a_message_before_hello_opens_no_attempt(scene: Scene) -> None:
    attacker = scene.attacker()
    attacker.say(register(scene.ticket()))
    attacker.say(scene.as_d())
    assert isinstance(attacker.hear((Hello, Nack)), Hello)
    assert scene.p.agent.stats().outstanding == 0

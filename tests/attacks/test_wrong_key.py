"""A peer with a wrong key, with another engine's key, or with none."""

from __future__ import annotations

import pytest
import zmq

from baton.errors import ConfigError
from baton.handoff.protocol.events import DecodeFailed, DecodeReleased
from baton.handoff.protocol.messages import Hello
from baton.handoff.session.keys import KeyRing, make_keys
from baton.handoff.session.sockets import Channel
from baton.kv.interval import Interval
from simulation.fuzz.pair import attacked
from testkit.waiting import eventually
from tests.attacks.attacker import KEYS, TICKET_KEY, Scene


@pytest.mark.parametrize("key", ["unknown", "none"])
def test_a_peer_without_an_authorised_key_gets_no_word_in(
    keyed: Scene, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    before = keyed.p.agent.stats()
    attacker = keyed.attacker(pair=zmq.curve_keypair() if key == "unknown" else None)
    attacker.say(keyed.as_d())
    eventually(lambda: keyed.p.agent.stats().refused >= 1)
    eventually(lambda: "a connection" in caplog.text and "was refused" in caplog.text)
    assert attacker.hears_nothing(Hello)
    assert keyed.p.agent.stats().frames == before.frames
    keyed.traffic.serve_one()


def test_an_authorised_engine_cannot_speak_for_another(keyed: Scene, caplog: pytest.LogCaptureFixture) -> None:
    assert keyed.keys is not None
    make_keys(keyed.keys, ["E"])
    ring = KeyRing(keyed.keys, "E")
    keyed.traffic.serve_one()
    attacker = keyed.attacker(pair=(ring.public, ring.secret))
    attacker.say(keyed.as_d())
    eventually(lambda: keyed.p.agent.stats().malformed == 1)
    eventually(lambda: "HELLO of engine 'D' came with the key of 'E'" in caplog.text)
    assert attacker.hears_nothing(Hello)
    # Nor can it take over the session by naming the other's process and memory.
    attacker.join(keyed.as_d(engine_id="E"))
    assert keyed.p.agent.stats().sessions == 2
    keyed.traffic.serve_one()


def test_an_engine_that_answers_with_another_key_is_not_believed(keyed: Scene) -> None:
    """The ticket sends D to the address of P, at which another engine listens."""
    assert keyed.keys is not None
    impostor = keyed.node("Q")
    address = impostor.agent.address.replace("curve://Q@", "curve://P@")
    ticket = keyed.ticket(prefill_addresses=[address])
    keyed.d.agent.open_decode(
        ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, {"target": [1], "draft": [2]}
    )
    eventually(lambda: impostor.agent.stats().refused >= 1)
    assert impostor.agent.stats().frames == 0
    failed = keyed.d.events.get(timeout=60)
    assert isinstance(failed, DecodeFailed)
    assert failed.reason == "unreachable_peer"
    assert isinstance(keyed.d.events.get(timeout=60), DecodeReleased)


def test_an_engine_without_keys_does_not_talk_to_one_with_them(keyed: Scene) -> None:
    bare = attacked("B", TICKET_KEY, None)
    keyed.nodes.append(bare)
    pages = {"target": [1], "draft": [2]}
    wanted = {"target": Interval(0, 4), "draft": Interval(0, 4)}
    for d, p in ((bare, keyed.p), (keyed.d, bare)):
        ticket = keyed.ticket(
            prefill_engine=p.name,
            prefill_incarnation=p.incarnation,
            prefill_addresses=[p.agent.address],
            decode_engine=d.name,
            decode_incarnation=d.incarnation,
        )
        d.agent.open_decode(ticket, 4, wanted, pages)
        failed = d.events.get(timeout=60)
        assert isinstance(failed, DecodeFailed)
        assert failed.reason == "unreachable_peer"
        assert "keys" in failed.message
        assert isinstance(d.events.get(timeout=60), DecodeReleased)
    assert keyed.p.agent.stats().frames == bare.agent.stats().frames == 0


def test_no_open_socket_without_keys() -> None:
    with pytest.raises(ConfigError, match="can be reached from other hosts"):
        Channel("tcp://0.0.0.0:*", KEYS)

"""Many sessions, connections and messages: resources stay bounded, and others are not delayed for long."""

from __future__ import annotations

import random
import threading
import time

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.frames import PROTOCOL_VERSION, decode_frame, encode_frame
from baton.handoff.protocol.messages import AttemptKey, ControlMessage, Hello
from baton.handoff.session.accepted import MAX_UNPROVEN
from baton.handoff.session.curve import as_client
from simulation.fuzz import messages
from simulation.fuzz.frames import FrameMaker, message_classes
from testkit.processes.leftovers import open_files
from testkit.waiting import eventually
from tests.attacks.attacker import CHALLENGE, KEYS, Scene


def test_new_identities_push_out_one_another_and_no_peer(scene: Scene) -> None:
    """Strangers' sessions are bounded; a proven engine keeps its own."""
    scene.traffic.serve_one()
    context = zmq.Context()
    stop = threading.Event()
    sent = 0

    def flood() -> None:
        nonlocal sent
        sockets = [context.socket(zmq.DEALER) for _ in range(2 * MAX_UNPROVEN)]
        for sock in sockets:
            sock.setsockopt(zmq.LINGER, 0)
            as_client(sock, KEYS, KEYS.public)
            sock.connect(scene.p.agent.address)
        while not stop.is_set():
            for sock in sockets:
                hello = scene.as_d(engine_id=f"E{sent}", incarnation=f"E-{sent}")
                sock.send(encode_frame(hello, sent + 1, 1))
                sent += 1
            time.sleep(0.1)
        for sock in sockets:
            sock.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        served = 0
        while served < 6 or sent <= 4 * MAX_UNPROVEN or not scene.p.agent.stats().evicted:
            scene.traffic.serve_one()
            served += 1
    finally:
        stop.set()
        thread.join()
        context.term()
    assert scene.p.agent.stats().sessions == 1
    # A new peer can still connect.
    scene.d = scene.traffic.d = scene.node("D2")
    scene.traffic.serve_one()


def test_connections_that_say_nothing_hold_no_session(scene: Scene) -> None:
    attackers = [scene.attacker() for _ in range(100)]
    scene.traffic.serve_one()
    assert scene.p.agent.stats().sessions == 1
    for attacker in attackers:
        attacker.sock.close(0)


def test_session_after_session_on_one_connection(scene: Scene) -> None:
    """The memory that a stranger's HELLO describes is never mapped."""
    attacker = scene.attacker()
    descriptor = scene.node("X").hello.descriptor
    files = open_files()
    for i in range(500):
        attacker.session, attacker.sequence = i + 1, 0
        attacker.say(scene.as_d(engine_id="E", incarnation=f"E-{i}", descriptor=descriptor))
        if i % 50 == 0:
            attacker.hear(Hello)
    eventually(lambda: scene.p.agent.stats().frames >= 500)
    assert scene.p.agent.stats().sessions == 0
    eventually(lambda: (open_files() - files).total() <= 8)


def test_one_message_in_many_parts_is_one_refusal(scene: Scene) -> None:
    attacker = scene.attacker()
    attacker.sock.send_multipart([b"x"] * 2000)
    eventually(lambda: scene.p.agent.stats().malformed == 1)


def test_a_frame_over_the_size_limit_ends_only_its_own_connection(scene: Scene) -> None:
    attacker = scene.attacker()
    attacker.say(scene.as_d())
    attacker.hear(Hello)
    attacker.sock.send(bytes(9 << 20))
    scene.traffic.serve_one()


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_slice_of_the_fuzzer(with_keys: bool) -> None:
    """The complete fuzzer: `python -m simulation.fuzz.messages --messages 1000000`."""
    report = messages.run(4_000, seed=7, processes=1, with_keys=with_keys)
    assert report.faults == []
    assert report.received >= 4_000
    stats = report.stats["P"]
    assert stats.malformed > 400
    assert stats.rejected > 40


# ---------------------------------------------------------------- the decoder alone

HELLO = Hello("X", "X-1", {"model": "m"}, Instance(rank=0, groups={}), CHALLENGE, descriptor=b"d")
KEY = AttemptKey(bytes(16), 0, "P-1", "D-1")


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 60))
def test_decode_takes_it_or_says_why_not(seed: int) -> None:
    maker = FrameMaker(random.Random(seed), HELLO, [KEY], ["ticket"])
    for _ in range(20):
        for part in maker.next():
            try:
                session, sequence, message = decode_frame(part)
            except ProtocolError:
                continue
            # An accepted message is well formed: it survives a round trip.
            assert decode_frame(encode_frame(message, session, sequence)) == (
                session,
                sequence,
                message,
            ) or "nan" in repr(message)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_frame(data)


@pytest.mark.parametrize("kind", sorted(message_classes()))
def test_the_fuzzer_knows_every_kind(kind: str) -> None:
    """A body without mutations is accepted, so that refusals are due to the mutation."""
    maker = FrameMaker(random.Random(1), HELLO, [KEY], ["ticket"])
    kinds: set[type[ControlMessage]] = set()
    for _ in range(50):
        frame = msgspec.msgpack.encode([PROTOCOL_VERSION, 1, 1, kind, maker.body(kind)])
        kinds.add(type(decode_frame(frame)[2]))
    assert kinds == {message_classes()[kind]}

"""Block tables and intervals that exceed the sender's own registration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zmq

from baton.errors import ProtocolError
from baton.handoff.protocol.events import DecodeFailed, DecodeReleased
from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.handshake import prove, seal, session_key
from baton.handoff.protocol.messages import Bye, Hello, Nack, Ready, Register
from baton.handoff.protocol.ticket import sign_ticket
from baton.handoff.session.curve import as_server
from baton.kv.geometry import CopyList
from baton.kv.interval import Interval
from simulation.fuzz.pair import Node
from testkit.waiting import eventually
from tests.attacks.attacker import KEYS, TICKET_KEY, Scene

FIT = {"target": [1, 2], "draft": [3, 4]}
BAD_TABLES = {
    "too high": [1, 64],
    "far too high": [1, (1 << 31) - 1],
    "null": [0, 1],
    "twice": [1, 1],
    "short": [1],
    "empty": [],
}


@pytest.mark.parametrize("what", BAD_TABLES)
def test_destination_pages_out_of_range(scene: Scene, caplog: pytest.LogCaptureFixture, what: str) -> None:
    scene.traffic.serve_one()
    ticket = scene.ticket()
    scene.p.agent.open_prefill(ticket)
    scene.p.agent.declare_final(ticket.key, 8, FIT, {"target": 8, "draft": 7})
    before = {name: pool.copy() for name, pool in scene.d.pools.items()}
    attacker = scene.attacker()
    wanted = {"target": Interval(0, 8), "draft": Interval(0, 8)}
    tables = {**FIT, "target": BAD_TABLES[what]}
    attacker.join(scene.as_d())
    attacker.say(Register(ticket.key, ticket=sign_ticket(TICKET_KEY, ticket), wanted=wanted, pages=tables))
    nack = attacker.hear(Nack)
    assert isinstance(nack, Nack)
    assert "group 'target'" in nack.message
    assert "refused REGISTER" in caplog.text
    assert scene.p.agent.stats().rejected == 1
    assert all(np.array_equal(before[name], pool) for name, pool in scene.d.pools.items())
    scene.p.agent.abort(ticket.key, "over")
    scene.p.events.get(timeout=60)


@pytest.mark.parametrize(
    "wanted",
    [
        {"target": Interval(0, 1 << 24), "draft": Interval(0, 8)},
        {"target": Interval(0, 8), "other": Interval(0, 8)},
        {"target": Interval(0, 8)},
    ],
    ids=["beyond the table", "unknown group", "missing group"],
)
def test_intervals_that_do_not_exist(scene: Scene, wanted: dict[str, Interval]) -> None:
    ticket = scene.ticket()
    attacker = scene.attacker()
    attacker.join(scene.as_d())
    attacker.say(Register(ticket.key, ticket=sign_ticket(TICKET_KEY, ticket), wanted=wanted, pages=FIT))
    attacker.hear(Nack)
    assert scene.p.agent.stats().rejected == 1


def test_a_reversed_interval_is_none(scene: Scene) -> None:
    """The decoder refuses it, like a position beyond all prompts."""
    ticket = scene.ticket()
    attacker = scene.attacker()
    attacker.join(scene.as_d())
    for count, tokens in enumerate([(8, 0), (-1, 8), (0, (1 << 24) + 1)], start=1):
        wanted: Any = {"target": tokens, "draft": Interval(0, 8)}
        attacker.say(Register(ticket.key, ticket=sign_ticket(TICKET_KEY, ticket), wanted=wanted, pages=FIT))
        eventually(lambda count=count: scene.p.agent.stats().malformed == count)


@pytest.mark.parametrize("body", [b"\xff", b"\xd3" + b"\xff" * 8, b"\xcf" + b"\xff" * 8, b"\xcb" + bytes(8), b"\xc0"])
def test_page_ids_that_are_no_page_ids(scene: Scene, body: bytes) -> None:
    """Negative, huge, a float, nil: the decoder refuses them."""
    ticket = scene.ticket()
    attacker = scene.attacker()
    register = Register(ticket.key, ticket=sign_ticket(TICKET_KEY, ticket), wanted={}, pages={"target": [77]})
    frame = encode_frame(register, attacker.session, 3)
    assert frame.count(b"\x91\x4d") == 1
    attacker.join(scene.as_d())
    attacker.send(frame.replace(b"\x91\x4d", b"\x91" + body))
    eventually(lambda: scene.p.agent.stats().malformed == 1)


@pytest.mark.parametrize("what", sorted(BAD_TABLES.keys() - {"twice"}))  # a page may be read twice
def test_source_pages_out_of_range(scene: Scene, caplog: pytest.LogCaptureFixture, what: str) -> None:
    """The prefill engine is hostile: it offers pages that it does not have, for D to read."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    as_server(router, KEYS)
    router.bind("tcp://127.0.0.1:*")
    hostile = router.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        ticket = scene.ticket(mode="pull", prefill_addresses=[hostile])
        before = {name: pool.copy() for name, pool in scene.d.pools.items()}
        scene.d.agent.open_decode(ticket, 8, {"target": Interval(0, 8), "draft": Interval(0, 8)}, FIT)
        sequence = 0
        while True:
            assert router.poll(10_000)
            identity, frame, *_ = router.recv_multipart()
            session, _, message = decode_frame(frame)
            sequence += 1
            if isinstance(message, Hello):
                answer = prove(TICKET_KEY, "answered", hostile, message.challenge, scene.p.hello)
                key = session_key(TICKET_KEY, message.challenge, answer.challenge)
                router.send_multipart([identity, encode_frame(answer, session, sequence)])
            elif isinstance(message, Register):
                tables = {**FIT, "target": BAD_TABLES[what]}
                ready = Ready(ticket.key, final={"target": 8, "draft": 8}, pages=tables)
                frame = encode_frame(ready, session, sequence)
                router.send_multipart([identity, frame, seal(key, "answered", frame)])
                break
        failed = scene.d.events.get(timeout=60)
        assert isinstance(failed, DecodeFailed)
        assert failed.reason in ("transfer_failed", "incomplete_commit")
        assert isinstance(scene.d.events.get(timeout=60), DecodeReleased)
        assert all(np.array_equal(before[name], pool) for name, pool in scene.d.pools.items())
        frame = encode_frame(Bye("x", quiet=True), session, sequence + 1)
        router.send_multipart([identity, frame, seal(key, "answered", frame)])
    finally:
        router.close()
        context.term()


def test_a_copy_outside_the_registered_memory_is_refused_by_the_transport(scene: Scene) -> None:
    """The last line of defence: even a wrong plan moves no byte outside a region."""
    other: Node = scene.d
    assert other.hello.descriptor is not None
    peer = scene.p.transport.connect(other.hello.descriptor).result(60)
    size = other.pools["target"].nbytes
    at, count = np.array([0], dtype=np.int64), np.array([16], dtype=np.int64)
    for offset in (size - 15, size, -1, 1 << 60, (1 << 63) - 1):
        bad = np.array([offset], dtype=np.int64)
        for copies in (CopyList(0, 0, at, bad, count), CopyList(0, 0, bad, at, count)):
            with pytest.raises(ProtocolError, match="lies outside"):
                scene.p.transport.submit(peer, "write", copies)
    with pytest.raises(ProtocolError, match="region 9"):
        scene.p.transport.submit(peer, "write", CopyList(0, 9, at, at, count))

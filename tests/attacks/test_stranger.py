"""A process that replays an engine's messages without a proof, although CURVE accepted it."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
import zmq

from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.events import DecodeCommitted, DecodeFailed, DecodeReleased, PrefillReleased
from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.handshake import is_proven, prove
from baton.handoff.protocol.messages import (
    Ack,
    Bye,
    Cancel,
    Cancelled,
    Commit,
    Hello,
    ReadDone,
    Ready,
    Register,
    Renew,
    Seeds,
)
from baton.handoff.protocol.ticket import sign_ticket
from baton.handoff.session.curve import as_server
from baton.kv.interval import Interval
from testkit.inside import rank_handoffs_of
from testkit.waiting import eventually
from tests.attacks.attacker import CHALLENGE, KEYS, TICKET_KEY, Scene

TOKENS = 8
PAGES = {"target": [1, 2], "draft": [3, 4]}
WANTED = {"target": Interval(0, TOKENS), "draft": Interval(0, TOKENS)}


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_session_is_not_taken_over_by_repeating_its_hello(scene: Scene, mode: str) -> None:
    """It replays D's complete HELLO, its REGISTER with the ticket, and any message that would make P free pages."""
    p, d = scene.p, scene.d
    ticket = scene.ticket(mode=mode)
    p.agent.open_prefill(ticket)
    p.agent.declare_final(ticket.key, TOKENS, PAGES, {"target": 4, "draft": 3})
    d.agent.open_decode(ticket, TOKENS, WANTED, PAGES)
    eventually(lambda: p.agent.stats().sessions == 1)
    before = p.agent.stats().rejected
    stranger = scene.attacker()
    register = Register(ticket.key, sign_ticket(TICKET_KEY, ticket), WANTED, PAGES)
    said = [register, Renew(5.0, 1), Ack(ticket.key), ReadDone(ticket.key), Cancel(ticket.key, "x")]
    said += [Cancelled(ticket.key, "x"), Bye("x", quiet=True)]
    proofs = [b"", bytes(32), prove(b"x" * 32, "dialled", stranger.address, CHALLENGE, d.hello).proof]
    for number, message in enumerate(said):
        stranger.session, stranger.sequence = number + 1, 0
        stranger.say(msgspec.structs.replace(scene.as_d(), proof=proofs[number % 3]))
        answer = stranger.hear((Hello, Ready, Commit))
        assert isinstance(answer, Hello)
        assert answer.descriptor is None
        stranger.say(message)
    eventually(lambda: p.agent.stats().rejected - before >= len(said) - 1)
    assert (p.agent.stats().sessions, p.agent.stats().outstanding) == (1, 1)
    assert p.events.empty()
    p.agent.finish_prefill(ticket.key, Seeds(first_token=1), False, dict.fromkeys(PAGES, TOKENS))
    assert isinstance(d.events.get(timeout=60), DecodeCommitted)
    assert p.events.get(timeout=60) == PrefillReleased(ticket.key, "committed")
    stranger.session, stranger.sequence = len(said) + 1, 0
    stranger.say(scene.as_d())
    assert isinstance(stranger.hear((Hello, Ready, Commit)), Hello)


def test_a_proof_that_was_overheard_is_of_no_use_again(scene: Scene) -> None:
    """P draws a challenge per connection, and a proof is valid for one address and one side."""
    first, second = scene.attacker(), scene.attacker()
    hello = scene.as_d(engine_id="E", incarnation="E-1")
    first.say(msgspec.structs.replace(hello, descriptor=None))
    challenge = first.hear(Hello).challenge  # type: ignore[attr-defined]
    proven = prove(TICKET_KEY, "dialled", first.address, challenge, hello)
    second.session, second.sequence = first.session, first.sequence
    second.say(proven)
    assert second.hear(Hello).descriptor is None  # type: ignore[attr-defined]
    for wrong in (
        prove(TICKET_KEY, "answered", first.address, challenge, hello),
        prove(TICKET_KEY, "dialled", scene.d.agent.address, challenge, hello),
        msgspec.structs.replace(proven, incarnation="D-1"),
        msgspec.structs.replace(proven, descriptor=b"another"),
    ):
        first.say(wrong)
        assert first.hear(Hello).descriptor is None  # type: ignore[attr-defined]
    assert scene.p.agent.stats().sessions == 0
    first.say(proven)
    assert first.hear(Hello).descriptor is not None  # type: ignore[attr-defined]
    assert scene.p.agent.stats().sessions == 1


def test_a_stranger_at_the_address_of_a_dead_engine_gets_nothing(scene: Scene) -> None:
    """It gets neither D's descriptor nor its REGISTER, and none of its messages makes D free or commit pages."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    as_server(router, KEYS)
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        ticket = scene.ticket(prefill_addresses=[address])
        before = {name: pool.copy() for name, pool in scene.d.pools.items()}
        scene.d.agent.open_decode(ticket, TOKENS, WANTED, PAGES)
        assert router.poll(60_000)
        identity, frame, *_ = router.recv_multipart()
        session, _, hello = decode_frame(frame)
        assert isinstance(hello, Hello)
        assert (hello.proof, hello.descriptor) == (b"", None)
        commit = Commit(ticket.key, final={"target": TOKENS, "draft": TOKENS}, seeds=Seeds(first_token=1))
        said = [scene.p.hello, prove(b"x" * 32, "answered", address, hello.challenge, scene.p.hello), commit]
        said += [Cancelled(ticket.key, "x"), Bye("x", quiet=True)]
        for number, message in enumerate(said, start=1):
            router.send_multipart([identity, encode_frame(message, session, number)])
        failed = scene.d.events.get(timeout=60)
        assert isinstance(failed, DecodeFailed)
        assert (failed.reason, failed.recoverable) == ("unreachable_peer", True)
        # D never sent a REGISTER, so nothing can write its pages.
        assert isinstance(scene.d.events.get(timeout=60), DecodeReleased)
        while router.poll(300):
            message = decode_frame(router.recv_multipart()[1])[2]
            assert isinstance(message, Hello), message
            assert (message.proof, message.descriptor) == (b"", None)
        assert all(np.array_equal(before[name], pool) for name, pool in scene.d.pools.items())
    finally:
        router.close()
        context.term()


def test_a_proof_covers_all_of_a_hello(scene: Scene) -> None:
    address, hello = "tcp://127.0.0.1:9", scene.p.hello
    proven = prove(TICKET_KEY, "answered", address, CHALLENGE, hello)
    assert is_proven(TICKET_KEY, "answered", address, CHALLENGE, decode_frame(encode_frame(proven, 1, 1))[2])  # type: ignore[arg-type]
    assert not is_proven(TICKET_KEY, "answered", address, b"x" * 16, proven)
    assert not is_proven(b"x" * 32, "answered", address, CHALLENGE, proven)
    for name, other in (
        ("engine_id", "Q"),
        ("fingerprint", {}),
        ("instance", Instance(rank=0, groups={})),
        ("challenge", b"x" * 16),
    ):
        changed = msgspec.structs.replace(proven, **{name: other})
        assert not is_proven(TICKET_KEY, "answered", address, CHALLENGE, changed), name


def test_messages_from_a_stranger_at_a_dead_engines_address_are_ignored(scene: Scene) -> None:
    """D's socket reconnects by itself, in an open session, and reveals the session's number."""
    p, d = scene.p, scene.d
    scene.traffic.serve_one()
    ticket = scene.ticket()
    d.agent.open_decode(ticket, TOKENS, WANTED, PAGES)
    before = {name: pool.copy() for name, pool in d.pools.items()}
    eventually(lambda: p.agent.stats().outstanding == 1)
    # It dies without sending anything.
    rank_handoffs_of(p.agent).abort_all = lambda: None  # type: ignore[method-assign]
    rank_handoffs_of(p.agent).sessions.say_bye = lambda reason, quiet: None  # type: ignore[method-assign]
    close, p.agent._channel.close = p.agent._channel.close, lambda bye=None: close()  # type: ignore[method-assign]
    p.agent.close()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        as_server(router, KEYS)
        router.bind(p.agent.address)
        deadline = time.monotonic() + 60
        while d.events.empty():
            assert time.monotonic() < deadline
            if not router.poll(100):
                continue
            identity, frame, *_ = router.recv_multipart()
            session, _, message = decode_frame(frame)
            assert not isinstance(message, Hello) or message.descriptor is None
            commit = Commit(ticket.key, final={"target": TOKENS, "draft": TOKENS}, seeds=Seeds(first_token=1))
            for number, forged in enumerate((commit, Cancelled(ticket.key, "x"), Bye("x", quiet=True))):
                router.send_multipart([identity, encode_frame(forged, session, (1 << 60) + number)])
        failed = d.events.get()
        assert isinstance(failed, DecodeFailed)
        assert failed.reason in ("lease_expired", "unreachable_peer", "peer_lost")
        assert all(np.array_equal(before[name], pool) for name, pool in d.pools.items())
    scene.nodes.remove(p)
    p.transport.close()
    scene.d = scene.traffic.d = scene.node("D")
    scene.p = scene.traffic.p = scene.node("P")

"""Strangers at the sockets, below the message level, and listeners at a former engine's address."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

import baton
from baton.handoff.protocol.events import DecodeFailed, DecodeReleased
from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.messages import Bye, Hello
from baton.handoff.session.curve import as_server
from baton.handoff.session.keys import TicketKeys
from baton.kv.interval import Interval
from baton.kvevents.config import KVEventsConfig
from baton.kvevents.publisher import EventPublisher
from simulation.fuzz import sockets
from simulation.fuzz.http_bytes import HttpMaker
from simulation.fuzz.zmtp import ZmtpMaker
from testkit.waiting import eventually
from tests.attacks.attacker import KEYS, TICKET_KEY, Scene


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_slice_of_the_socket_fuzzer(with_keys: bool) -> None:
    """The complete fuzzer: `python -m simulation.fuzz.sockets --frames 10000000`."""
    report = sockets.run(8_000, seed=1, processes=1, with_keys=with_keys, settle_s=0.0)
    assert report.faults == []
    assert report.sent.frames >= 8_000
    kinds = report.sent.kinds
    assert min(kinds.values()) > 4
    # Strangers come to the last message of a handshake, where their key is refused.
    assert ("initiate" in kinds) == with_keys
    assert report.victims is not None
    assert report.victims.refused > 80


@pytest.mark.parametrize("make", [HttpMaker, ZmtpMaker])
def test_an_attack_is_reproducible(make: Callable[[random.Random], HttpMaker | ZmtpMaker]) -> None:
    """By its seed, although later connections are made of the bytes of earlier ones."""
    first, second, other = (make(random.Random(seed)) for seed in (1, 1, 2))
    sent = [[step for _ in range(200) for step in maker.steps()] for maker in (first, second, other)]
    assert sent[0] == sent[1] != sent[2]
    assert min(first.kinds.made.values()) > 1
    datas = [step.data for step in sent[0] if step.frames > 4]
    assert len(set(datas)) == len(datas) > 20


def test_without_the_ticket_key_no_frame_arrives(scene: Scene) -> None:
    """Also without a key directory. There is no session yet, in which D's own frames would arrive."""
    address, before = scene.p.agent.address, scene.p.agent.stats()
    with zmq.Context() as context:
        plain, wrong = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        other = TicketKeys(b"x" * 32)
        wrong.curve_publickey, wrong.curve_secretkey, wrong.curve_serverkey = other.public, other.secret, other.public
        for number, sock in enumerate((plain, wrong), start=1):
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(address)
            sock.send(encode_frame(scene.as_d(), 1, 1))
            eventually(lambda number=number: scene.p.agent.stats().refused >= before.refused + number)
            assert not sock.poll(50)
            sock.close()
    assert scene.p.agent.stats().frames == before.frames


def test_every_router_socket_begins_its_ids_at_random() -> None:
    """Or the first ids of every process are the same, and a stranger who claims them ends it."""
    made = [path for path in Path(baton.__file__).parent.rglob("*.py") if "zmq.ROUTER" in path.read_text("utf-8")]
    assert len(made) >= 2
    assert [path.name for path in made if "    begin_ids_at_random()\n" not in path.read_text("utf-8")] == []


def test_no_stranger_knows_the_ids_of_a_replay_socket() -> None:
    libc, endpoint = ctypes.CDLL(None), "tcp://127.0.0.1:*"
    libc.srand(1)
    with zmq.Context() as context, context.socket(zmq.PUB), context.socket(zmq.ROUTER):
        known = libc.rand()
    libc.srand(1)
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=endpoint)
    with contextlib.closing(EventPublisher(config)):
        assert libc.rand() != known


def test_the_pair_of_a_ticket_key_is_its_own() -> None:
    assert TicketKeys(TICKET_KEY).secret == KEYS.secret
    assert TicketKeys(b"x" * 32).public != KEYS.public
    assert KEYS.engine_of(bytes(32)) is None
    assert KEYS.engine_of(b"") is None


def test_a_peer_that_ends_every_session_is_dialled_less_and_less_and_fails_the_leg(scene: Scene) -> None:
    """A process with the ticket key listens at the address of a dead engine, and answers BYE to everything."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        as_server(router, KEYS)
        router.bind("tcp://127.0.0.1:*")
        ticket = scene.ticket(prefill_addresses=[router.getsockopt_string(zmq.LAST_ENDPOINT)])
        wanted = {"target": Interval(0, 8), "draft": Interval(0, 8)}
        scene.d.agent.open_decode(ticket, 8, wanted, {"target": [1, 2], "draft": [3, 4]})
        hellos, ended, deadline = 0, None, time.monotonic() + 60
        while ended is None:
            assert time.monotonic() < deadline
            if router.poll(20):
                identity, frame, *_ = router.recv_multipart()
                session, _, message = decode_frame(frame)
                hellos += isinstance(message, Hello)
                router.send_multipart([identity, encode_frame(Bye("unknown_session"), session, 1 << 60)])
            try:
                ended = scene.d.events.get_nowait()
            except queue.Empty:
                continue
        assert isinstance(ended, DecodeFailed)
        assert (ended.reason, ended.recoverable) == ("unreachable_peer", True)
        assert isinstance(scene.d.events.get(timeout=60), DecodeReleased)
        # The first at once, and then after 0.1, 0.2, 0.2, ... seconds; the lease is 3.
        assert 2 <= hellos <= 25

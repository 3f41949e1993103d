"""Peers with whom no session can begin: D learns it at once, and waits for the lease only where nothing answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import zmq

from baton.handoff.protocol.events import DecodeFailed, DecodeReleased
from baton.handoff.protocol.frames import PROTOCOL_VERSION, decode_frame, encode_frame
from baton.handoff.protocol.messages import Bye, Hello, Renew
from baton.handoff.session.curve import as_client, as_server
from baton.handoff.session.keys import TicketKeys
from baton.kv.interval import Interval
from testkit.handoffs.nodes import KEY, TIMERS, Node, Pair, ticket_for

# Longer than `Node.next` waits.
LONG = replace(TIMERS, lease=600.0)
OTHER = PROTOCOL_VERSION + 1


def of_other_version(message: Bye | Renew, session: int = 1) -> bytes:
    version, *rest = msgspec.msgpack.decode(encode_frame(message, session, 1))
    assert version == PROTOCOL_VERSION
    return msgspec.msgpack.encode([OTHER, *rest])


def failure(d: Node, p: Node, address: str) -> DecodeFailed:
    ticket = ticket_for(p, d, "push", prefill_addresses=[address])
    d.agent.open_decode(ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
    failed = d.next(DecodeFailed)
    assert isinstance(failed, DecodeFailed)
    d.next(DecodeReleased)
    return failed


def nobody(pair: Pair) -> str:
    return "tcp://127.0.0.1:1"


def another_key(pair: Pair) -> str:
    return pair.node("Q", ticket_key=b"x" * 32).address


@pytest.mark.parametrize("where", [nobody, another_key])
def test_an_address_that_takes_no_connection_ends_the_leg_at_once(pair: Pair, where: Callable[[Pair], str]) -> None:
    p, d = pair.node("P"), pair.node("D", timers=LONG)
    address = where(pair)
    # The second leg finds a session that D still tries to begin.
    for _ in range(2):
        failed = failure(d, p, address)
        assert (failed.reason, failed.recoverable) == ("unreachable_peer", True)
        assert address in failed.message
        assert "nobody is there, or it has another ticket key" in failed.message


def test_an_engine_of_another_protocol_version_is_named_with_both_versions(pair: Pair) -> None:
    p, d = pair.node("P"), pair.node("D", timers=LONG)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        as_server(router, TicketKeys(KEY))
        router.bind("tcp://127.0.0.1:*")
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        ticket = ticket_for(p, d, "push", prefill_addresses=[address])
        d.agent.open_decode(ticket, 4, {"target": Interval(0, 4), "draft": Interval(0, 4)}, d.pages(1, 4))
        identity, frame = router.recv_multipart()
        assert isinstance(decode_frame(frame)[2], Hello)
        router.send_multipart([identity, of_other_version(Bye("other_version"))])
        failed = d.next(DecodeFailed)
        assert isinstance(failed, DecodeFailed)
        assert (failed.reason, failed.recoverable) == ("incompatible_peer", False)
        said = f"{address} has version {OTHER} of the handoff protocol, this engine {PROTOCOL_VERSION}"
        assert failed.message == said
        d.next(DecodeReleased)


def test_a_frame_of_another_protocol_version_is_answered_in_ours(pair: Pair) -> None:
    p = pair.node("P")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        keys = TicketKeys(KEY)
        as_client(dealer, keys, keys.public)
        dealer.connect(p.address)
        dealer.send(of_other_version(Renew(3.0, 1)))
        assert dealer.poll(60_000)
        assert decode_frame(dealer.recv())[2] == Bye("other_version")
    assert p.agent.stats().malformed == 1
    assert p.agent.stats().sessions == 0

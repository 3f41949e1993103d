"""A slow connection delays nothing else: real agents, and transports whose connections block."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from baton.errors import TransportError
from baton.handoff.protocol.events import DecodeCommitted, DecodeReleased, PrefillReleased
from baton.handoff.session.connecting import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_REFUSED, TransportEnds
from baton.kv.interval import Interval
from baton.transports.base import Peer
from baton.transports.mapped.local import LocalTransport
from testkit.handoffs.modelled_network import TIMERS, Clock, Node, World
from testkit.inside import peers_of


class Hanging(LocalTransport):
    """Connections to `hangs` wait until `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs: set[bytes] = set()
        self.waiting: list[tuple[bytes, Future[Peer]]] = []

    def connect(self, descriptor: bytes) -> Future[Peer]:
        if descriptor not in self.hangs:
            return super().connect(descriptor)
        self.waiting.append((descriptor, Future()))
        return self.waiting[-1][1]

    def answer(self, error: Exception | None = None) -> None:
        self.hangs.clear()
        for descriptor, future in self.waiting:
            if error is None:
                future.set_result(super().connect(descriptor).result())
            else:
                future.set_exception(error)
        self.waiting.clear()


class Raising(LocalTransport):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error, self.is_broken = error, True

    def connect(self, descriptor: bytes) -> Future[Peer]:
        if not self.is_broken:
            return super().connect(descriptor)
        if self.error is not None:
            raise self.error
        return None  # type: ignore[return-value]


def node(world: World, name: str) -> tuple[Node, Hanging]:
    transport = Hanging()
    return Node(world, name, transport=transport), transport


@pytest.mark.parametrize("slow", ["P", "D"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_handoff_waits_for_its_connection_and_no_lease_ends_meanwhile(world: World, mode: str, slow: str) -> None:
    (p, to_d), (d, to_p) = node(world, "P"), node(world, "D")
    transport, far = (to_d, d) if slow == "P" else (to_p, p)
    transport.hangs.add(far.descriptor)
    ticket = world.begin(p, d, mode)
    world.prefill(p, ticket)
    world.run(2 * TIMERS.lease)
    assert transport.waiting
    assert p.handoffs.stats().lost_leases == d.handoffs.stats().lost_leases == 0
    assert d.events == p.events == []
    transport.answer()
    world.run(3)
    assert d.count(DecodeCommitted) == p.count(PrefillReleased) == 1
    assert world.settled()


@pytest.mark.parametrize("opened", [True, False])
def test_a_claim_that_came_in_time_does_not_expire_while_it_waits(world: World, opened: bool) -> None:
    (p, to_d), (d, _) = node(world, "P"), node(world, "D")
    to_d.hangs.add(d.descriptor)
    ticket = world.ticket(p, d, "push", life=2)
    if opened:
        p.handoffs.open_prefill(ticket)
    d.handoffs.open_decode(ticket, 8, {"target": Interval(0, 8)}, {"target": [3, 4]})
    world.run(1.5)
    if opened:
        world.prefill(p, ticket)
    world.run(2)
    assert d.events == []
    to_d.answer()
    world.run(1)
    if opened:
        assert d.count(DecodeCommitted) == p.count(PrefillReleased) == 1
    else:
        assert d.failures() == ["handoff_timeout"]
    assert world.settled()
    assert not p.handoffs.routing.registrations.holding


@pytest.mark.parametrize("slow", ["P", "D"])
def test_others_are_served_while_a_peer_does_not_answer(world: World, slow: str) -> None:
    (p, p_transport), (d, d_transport) = node(world, "P"), node(world, "D")
    if slow == "P":
        other, _ = node(world, "D2")
        p_transport.hangs.add(other.descriptor)
        world.begin(p, other, "push")
    else:
        other, _ = node(world, "P2")
        d_transport.hangs.add(other.descriptor)
        world.begin(other, d, "push")
    world.hand_over(p, d)
    assert p_transport.waiting or d_transport.waiting


@pytest.mark.parametrize("slow", ["P", "D"])
def test_a_connection_that_cannot_be_had_fails_the_attempt(world: World, slow: str) -> None:
    (p, to_d), (d, to_p) = node(world, "P"), node(world, "D")
    transport, far = (to_d, d) if slow == "P" else (to_p, p)
    transport.hangs.add(far.descriptor)
    world.begin(p, d, "push")
    transport.answer(TransportError("it is stopped"))
    world.run(2)
    assert d.failures() == ["unreachable_peer"]
    assert d.count(DecodeReleased) == 1
    world.run(FIRST_PAUSE_S)
    world.hand_over(p, d)


@pytest.mark.parametrize("error", [RuntimeError("no card"), OSError(5, "no card"), None])
@pytest.mark.parametrize("broken", ["P", "D"])
def test_whatever_connect_raises_the_next_request_connects(world: World, broken: str, error: Exception | None) -> None:
    transport = Raising(error)
    p, d = (Node(world, name, transport=transport if name == broken else None) for name in "PD")
    world.begin(p, d, "push")
    world.run(2)
    assert d.failures() == ["unreachable_peer"]
    transport.is_broken = False
    world.run(FIRST_PAUSE_S)
    world.hand_over(p, d)
    assert world.settled()


def test_a_connection_that_comes_too_late_is_let_go(world: World) -> None:
    (p, _), (d, to_p) = node(world, "P"), node(world, "D")
    to_p.hangs.add(p.descriptor)
    world.begin(p, d, "push")
    del world.nodes[p.address]
    world.run(TIMERS.lease + 2)
    to_p.answer()
    world.run(1)
    assert peers_of(to_p) == []


# ---------------------------------------------------------------- recently refused connections


@dataclass
class Refusing:
    tried: int = 0
    refuses: bool = True

    def connect(self, descriptor: bytes) -> Future[Peer]:
        self.tried += 1
        future: Future[Peer] = Future()
        if self.refuses:
            future.set_exception(TransportError("refused"))
        else:
            future.set_result(None)  # type: ignore[arg-type]
        return future


def test_pauses_between_refused_connections_grow() -> None:
    transport, clock = Refusing(), Clock()
    connector = TransportEnds(transport, clock, lambda: None)  # type: ignore[arg-type]

    def attempt(descriptor: bytes = b"far") -> bool:
        before = transport.tried
        future = connector.begin(descriptor)
        if transport.refuses:
            with pytest.raises(TransportError, match=r"^refused"):
                connector.result(future, descriptor)
        else:
            connector.result(future, descriptor)
        return transport.tried > before

    pause = FIRST_PAUSE_S
    for _ in range(10):
        assert attempt()
        clock.now += 0.9 * pause
        assert not attempt()
        assert attempt(b"another")
        clock.now += 0.2 * pause
        pause = min(2 * pause, LONGEST_PAUSE_S)
    transport.refuses = False
    assert attempt()
    transport.refuses = True
    assert attempt()
    clock.now += 1.1 * FIRST_PAUSE_S
    assert attempt(), "it had answered, so this pause was a first one"
    for number in range(MAX_REFUSED + 10):
        attempt(str(number).encode())
    assert len(connector._refused) == MAX_REFUSED

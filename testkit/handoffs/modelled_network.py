"""Real nodes over a modelled network, with a clock that the test moves."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np

from baton.handoff.agent.rank_handoffs import RankHandoffs
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.events import (
    Declared,
    DecodeCommitted,
    DecodeFailed,
    HandoffEvent,
    Sampled,
)
from baton.handoff.protocol.frames import decode_frame, encode_frame
from baton.handoff.protocol.messages import Bye, ControlMessage, Hello, Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket
from baton.handoff.session.base import Connection
from baton.handoff.session.config import AgentConfig, Timers
from baton.handoff.session.sessions import Sessions
from baton.kv.geometry import CopyList, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from baton.transports.base import Direction, Operation, Peer
from baton.transports.mapped.local import LocalTransport
from testkit.handoffs.tickets import make_ticket_between, signed

SEEDS = Seeds(first_token=5)
STEP = 0.05
N = 8
TIMERS = Timers(handoff=100.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeChannel:
    """One engine's channel. A frame takes one step of the world, and waits for a paused receiver."""

    malformed = 0

    def __init__(self, world: World, address: str) -> None:
        self.world, self.address = world, address
        self.dialled: dict[int, Connection] = {}
        self.accepted: dict[int, Connection] = {}
        self.routing: deque[tuple[int, bool, ControlMessage, FakeChannel]] = deque()
        self.sent: list[tuple[float, ControlMessage]] = []

    def dial(self, address: str) -> Connection:
        session = next(self.world.numbers)
        self.dialled[session] = Connection(session, None, address=address)
        return self.dialled[session]

    def drop(self, connection: Connection) -> None:
        known = self.dialled if connection.identity is None else self.accepted
        if known.get(connection.session) is connection:
            del known[connection.session]

    def send(self, connection: Connection, message: ControlMessage) -> None:
        self.sent.append((self.world.clock.now, message))
        message = decode_frame(encode_frame(message, connection.session, 1))[2]
        if connection.identity is not None:
            connection.socket.routing.append((connection.session, False, message, self))
        elif connection.session in self.dialled and connection.address in self.world.nodes:
            self.world.nodes[connection.address].channel.routing.append((connection.session, True, message, self))

    def wake(self) -> None: ...

    def receive(self) -> Iterator[tuple[Connection, ControlMessage]]:
        for _ in range(len(self.routing)):
            session, to_bound, message, sender = self.routing.popleft()
            known = self.accepted if to_bound else self.dialled
            if to_bound and session not in known:
                if not isinstance(message, Hello):
                    sender.routing.append((session, False, Bye("unknown_session"), self))
                    continue
                known[session] = Connection(session, sender, identity=b"x")
            if session in known:
                yield known[session], message


class StuckTransport(LocalTransport):
    """Copies begin, but never end before the connection is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck: list[Operation] = []
        self.hold = False

    def submit(self, peer: Peer, direction: Direction, copies: CopyList, tag: str = "") -> Operation:
        self.stuck.append(Operation(tag))
        return self.stuck[-1]

    def disconnect(self, peer: Peer) -> None:
        super().disconnect(peer)
        for operation in self.stuck if not self.hold else ():
            operation.end("the connection is closed")

    def cancel(self, operation: Operation) -> None: ...


class Node:
    def __init__(
        self,
        world: World,
        name: str,
        timers: Timers = TIMERS,
        incarnation: str = "1",
        stuck: bool = False,
        transport: LocalTransport | None = None,
    ) -> None:
        self.world, self.name, self.incarnation = world, name, f"{name}-{incarnation}"
        self.address = f"tcp://{name}"
        self.channel = FakeChannel(world, self.address)
        spec = GroupSpec(
            name="target",
            owner="target",
            kind="full",
            planes=kv_planes(1, 4, "float32"),
            page_size=4,
            layer_ids=(0,),
        )
        geometry = Geometry.block_major(spec, 16)
        self.transport = transport or (StuckTransport() if stuck else LocalTransport())
        self.memory = self.transport.allocate("target", geometry.region_bytes)
        self.descriptor = self.transport.register([self.memory])
        self.events: list[HandoffEvent] = []
        config = AgentConfig(name, self.incarnation, ticket_key=b"k", timers=timers)
        instance = Instance(rank=0, groups={"target": [RankGeometry(rank=0, geometry=geometry)]})
        sessions = Sessions(config, instance, self.transport, self.descriptor, self.channel, world.clock)
        self.handoffs = RankHandoffs(sessions, instance, self.transport, self.events.append)
        self.paused = False
        world.nodes[self.address] = self

    def step(self) -> None:
        self.handoffs.run_timers()
        for connection, message in self.channel.receive():
            self.handoffs.on_message(connection, message)
        while len(self.handoffs.operations) and not isinstance(self.transport, StuckTransport):
            self.handoffs.poll()
        self.handoffs.poll()

    def die(self) -> None:
        self.transport.close()
        del self.world.nodes[self.address]

    def failures(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, DecodeFailed)]

    def count(self, kind: type[HandoffEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def sent(self, kind: type[ControlMessage]) -> list[float]:
        return [at for at, message in self.channel.sent if isinstance(message, kind)]


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.numbers = itertools.count(1)
        self.nodes: dict[str, Node] = {}

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            self.clock.now += STEP
            for node in list(self.nodes.values()):
                if not node.paused:
                    node.step()

    def ticket(self, p: Node, d: Node, mode: str, life: float = 100) -> SignedTicket:
        return signed(make_ticket_between(p, d, self.clock.now + life, mode=mode), b"k")

    def prefill(self, p: Node, ticket: Ticket) -> None:
        p.handoffs.post(ticket.key, Declared(N, {"target": [1, 2]}, {"target": N}))
        p.handoffs.post(ticket.key, Sampled(SEEDS, False, {}))

    def begin(self, p: Node, d: Node, mode: str) -> SignedTicket:
        """Open and register both legs; P still prefills."""
        ticket = self.ticket(p, d, mode)
        p.handoffs.open_prefill(ticket)
        d.handoffs.open_decode(ticket, N, {"target": Interval(0, N)}, {"target": [3, 4]})
        self.run(0.5)
        return ticket

    def hand_over(self, p: Node, d: Node, mode: str = "push") -> None:
        """One complete handoff that must succeed."""
        before = d.count(DecodeCommitted)
        p.memory[:] = np.random.default_rng(before).integers(0, 255, p.memory.size, dtype=np.uint8)
        ticket = self.begin(p, d, mode)
        self.prefill(p, ticket)
        self.run(1.0)
        assert d.count(DecodeCommitted) == before + 1, (p.events, d.events)
        page = p.memory.size // 16
        np.testing.assert_array_equal(d.memory[3 * page : 5 * page], p.memory[page : 3 * page])

    def settled(self) -> bool:
        return not any(node.handoffs.stats().outstanding for node in self.nodes.values())

"""Two engines without models that hand requests over and compare every byte: the target of the fuzzers."""

from __future__ import annotations

import os
import queue
import time
from typing import Any

import numpy as np

from baton.handoff.agent.agent import AgentConfig, HandoffAgent
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.digests import MemoryDigester
from baton.handoff.protocol.events import DecodeCommitted, HandoffEvent
from baton.handoff.protocol.messages import CHALLENGE_BYTES, AttemptKey, Hello, Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket, new_transfer_id, sign_ticket
from baton.handoff.session.config import Timers
from baton.handoff.session.keys import KeyRing
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from baton.transports.registry import create_transport
from baton.wire import Mode

HANDOFF_LIMIT_S = 30.0
SPENT = 64  # tickets of past handoffs that attackers may know
# Tickets known to attackers stay valid for a whole attack; the tombstones of the others must go meanwhile.
_LONG_LIFE_S, SHORT_LIFE_S = 600, 15
GROUPS = {"target": 2, "draft": 1}  # layers
NUM_PAGES, HEADS, DIM = 64, 2, 4
_TOKENS = 38
_SEEDS = Seeds(first_token=5, draft_token_ids=[6, 7])
_TIMERS = Timers(retry=0.2, renew=0.5, lease=3.0)


class Node:
    """One engine without a model: pools, an agent and the agent's events. `config` is for `AgentConfig`."""

    def __init__(self, name: str, incarnation: str, scheme: str, page_size: int = 4, **config: Any) -> None:
        self.name, self.incarnation, self.page_size = name, incarnation, page_size
        self.transport = create_transport(scheme)
        self.geometries: dict[str, RankGeometry] = {}
        self.pools: dict[str, np.ndarray] = {}
        regions = []
        for index, (group, layers) in enumerate(GROUPS.items()):
            spec = GroupSpec(
                name=group,
                owner="draft" if group == "draft" else "target",
                kind="full",
                planes=kv_planes(HEADS, DIM, "float32"),
                page_size=page_size,
                module=int(group == "draft"),
                layer_ids=tuple(range(layers)),
            )
            geometry = Geometry.block_major(spec, NUM_PAGES, region=index)
            regions.append(self.transport.allocate(group, geometry.region_bytes))
            shape = (NUM_PAGES, layers, 2, page_size, HEADS, DIM)
            self.pools[group] = regions[index].view(np.float32).reshape(shape)
            self.geometries[group] = RankGeometry(rank=0, geometry=geometry)
        self.descriptor = self.transport.register(regions)
        self.digester = MemoryDigester(self.geometries, regions)
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        settings = AgentConfig(name, incarnation, **{"fingerprint": {"model": "m"}, **config})
        facts = {**settings.fingerprint, "handoff.integrity": settings.integrity}
        instance = Instance(rank=0, groups={group: [geometry] for group, geometry in self.geometries.items()})
        challenge = os.urandom(CHALLENGE_BYTES)
        self.hello = Hello(name, incarnation, facts, instance, challenge, descriptor=self.descriptor)
        self.agent = HandoffAgent(settings, instance, self.transport, self.descriptor, self.note, self.digester)
        self.agent.start()

    def note(self, event: HandoffEvent) -> None:
        """Take an event of the agent, on the agent's thread."""
        self.events.put(event)

    def close(self) -> None:
        self.agent.close()
        self.pools.clear()
        self.transport.close()


def attacked(name: str, ticket_key: bytes, keys: KeyRing | None) -> Node:
    """A node to attack, with a new incarnation for each call."""
    incarnation = f"{name}-{os.urandom(4).hex()}"
    return Node(name, incarnation, "shm://", ticket_key=ticket_key, keys=keys, timers=_TIMERS)


def make_ticket(p: Node, d: Node, mode: Mode, life_s: float) -> Ticket:
    """A ticket for a new transfer from `p` to `d`, valid for `life_s` seconds."""
    expiry = time.monotonic() + life_s
    return Ticket(
        transfer_id=new_transfer_id(),
        prefill_engine=p.name,
        prefill_incarnation=p.incarnation,
        prefill_addresses=[p.agent.address],
        decode_engine=d.name,
        decode_incarnation=d.incarnation,
        decode_addresses=[d.agent.address],
        mode=mode,
        prefill_expiry=expiry,
        decode_expiry=expiry,
        request_digest=bytes(32),
    )


class Traffic:
    """Legitimate handoffs from P to D one after the other, alternating push and pull."""

    def __init__(self, p: Node, d: Node, ticket_key: bytes) -> None:
        self.p, self.d = p, d
        self.spent: list[tuple[AttemptKey, str]] = []
        self.served = 0
        self.slowest_s = 0.0
        self.key = ticket_key
        self._rng = np.random.default_rng(0)

    def serve_one(self) -> None:
        """Do one handoff. Raises `AssertionError` if it fails, takes too long or a byte differs."""
        p, d, began = self.p, self.d, time.monotonic()
        life_s = _LONG_LIFE_S if self.served < SPENT else SHORT_LIFE_S
        plain = make_ticket(p, d, "pull" if self.served % 2 else "push", life_s)
        ticket = SignedTicket.of(plain, sign_ticket(self.key, plain))
        count = -(-_TOKENS // p.page_size)
        tables = [{g: self._rng.permutation(np.arange(1, NUM_PAGES))[:count].tolist() for g in GROUPS} for _ in "pd"]
        for group, table in tables[0].items():
            pages = p.pools[group][table]
            p.pools[group][table] = self._rng.random(pages.shape, np.float32)
        d.agent.open_decode(ticket, _TOKENS, dict.fromkeys(GROUPS, Interval(0, _TOKENS)), tables[1])
        p.agent.open_prefill(ticket)
        p.agent.declare_final(ticket.key, _TOKENS, tables[0], {"target": _TOKENS, "draft": _TOKENS - 1})
        p.agent.finish_prefill(ticket.key, _SEEDS, False, dict.fromkeys(GROUPS, _TOKENS))
        for node in (d, p):
            try:
                event = node.events.get(timeout=HANDOFF_LIMIT_S)
            except queue.Empty:
                raise AssertionError(f"no handoff within {HANDOFF_LIMIT_S} s: {node.agent.stats()}") from None
            assert event.key == ticket.key, event
            assert node is p or isinstance(event, DecodeCommitted), event
            assert getattr(event, "outcome", "committed") == "committed", event
        for group in GROUPS:
            want, got = p.pools[group][tables[0][group]], d.pools[group][tables[1][group]]
            # The last page also holds tokens that were not wanted.
            assert np.array_equal(want[:-1], got[:-1]), f"other bytes in group {group}"
        self.served += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.spent = [*self.spent[-SPENT + 1 :], (ticket.key, ticket.text)]

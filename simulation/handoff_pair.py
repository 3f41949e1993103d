"""Two engines without models that hand requests over and compare every byte: what attacks are aimed at."""

from __future__ import annotations

import os
import queue
import time

import numpy as np

from baton.handoff.channel.config import Timers
from baton.handoff.channel.keys import KeyRing
from baton.handoff.node.agent import AgentConfig, HandoffAgent
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.events import DecodeCommitted, HandoffEvent
from baton.handoff.protocol.messages import CHALLENGE_BYTES, AttemptKey, Hello, Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket, mint, new_transfer_id
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from baton.transports.registry import create_transport
from baton.wire import Mode

HANDOFF_LIMIT_S = 30.0
SPENT = 64  # tickets of past handoffs that attackers may know
# Those stay valid for as long as an attack lasts; of the others the tombstones must go meanwhile.
_LONG_LIFE_S, _SHORT_LIFE_S = 600, 15
_GROUPS = ("target", "draft")
_NUM_PAGES, _PAGE_SIZE, _TOKENS = 64, 4, 38
_SEEDS = Seeds(first_token=5, draft_token_ids=[6, 7])


class Node:
    """One engine without a model: pools, an agent, and the agent's events."""

    def __init__(self, name: str, ticket_key: bytes, keys: KeyRing | None) -> None:
        self.name, self.incarnation = name, f"{name}-{os.urandom(4).hex()}"
        self.transport = create_transport("shm://")
        self.pools: dict[str, np.ndarray] = {}
        geometries: dict[str, RankGeometry] = {}
        for index, group in enumerate(_GROUPS):
            spec = GroupSpec(
                name=group,
                owner="draft" if group == "draft" else "target",
                kind="full",
                planes=kv_planes(2, 8, "float32"),
                page_size=_PAGE_SIZE,
                module=int(group == "draft"),
                layer_ids=(0, 1),
            )
            geometry = Geometry.block_major(spec, _NUM_PAGES, region=index)
            self.pools[group] = self.transport.allocate(group, geometry.region_bytes)
            geometries[group] = RankGeometry(rank=0, geometry=geometry)
        descriptor = self.transport.register(list(self.pools.values()))
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        facts = {"model": "m"}
        timers = Timers(retry=0.2, renew=0.5, lease=3.0)
        config = AgentConfig(name, self.incarnation, fingerprint=facts, ticket_key=ticket_key, keys=keys, timers=timers)
        facts = {**facts, "handoff.integrity": config.integrity}
        instance = Instance.of_one_rank(geometries)
        challenge = os.urandom(CHALLENGE_BYTES)
        self.hello = Hello(name, self.incarnation, facts, instance, challenge, descriptor=descriptor)
        self.agent = HandoffAgent(config, instance, self.transport, descriptor, self.events.put)
        self.agent.start()

    def rows(self, group: str, pages: list[int]) -> np.ndarray:
        """The bytes of pages, `[pages, bytes of a page]`."""
        return self.pools[group].reshape(_NUM_PAGES, -1)[pages]

    def close(self) -> None:
        """End the agent and give the memory back."""
        self.agent.close()
        self.pools.clear()
        self.transport.close()


def make_ticket(p: Node, d: Node, mode: Mode, life_s: float) -> Ticket:
    """A ticket for a new transfer from `p` to `d`, good for `life_s` seconds from now on."""
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
    """Legitimate handoffs from P to D, one after the other, push and pull by turns."""

    def __init__(self, p: Node, d: Node, ticket_key: bytes) -> None:
        self.p, self.d = p, d
        self.spent: list[tuple[AttemptKey, str]] = []
        self.served = 0
        self.slowest_s = 0.0
        self.key = ticket_key
        self._rng = np.random.default_rng(0)

    def serve_one(self) -> None:
        """One handoff. Raises `AssertionError` when it fails, takes too long or a byte differs."""
        p, d, began = self.p, self.d, time.monotonic()
        life_s = _LONG_LIFE_S if self.served < SPENT else _SHORT_LIFE_S
        plain = make_ticket(p, d, "pull" if self.served % 2 else "push", life_s)
        ticket = SignedTicket.of(plain, mint(self.key, plain))
        count = -(-_TOKENS // _PAGE_SIZE)
        tables = [{g: self._rng.permutation(np.arange(1, _NUM_PAGES))[:count].tolist() for g in _GROUPS} for _ in "pd"]
        for group in _GROUPS:
            size = p.pools[group].size // _NUM_PAGES
            p.pools[group].reshape(_NUM_PAGES, -1)[tables[0][group]] = self._rng.integers(
                0, 256, (count, size), np.uint8
            )
        d.agent.open_decode(ticket, _TOKENS, dict.fromkeys(_GROUPS, Interval(0, _TOKENS)), tables[1])
        p.agent.open_prefill(ticket)
        p.agent.declare_final(ticket.key, _TOKENS, tables[0], {"target": _TOKENS, "draft": _TOKENS - 1})
        p.agent.finish_prefill(ticket.key, _SEEDS, False, dict.fromkeys(_GROUPS, _TOKENS))
        for node in (d, p):
            try:
                event = node.events.get(timeout=HANDOFF_LIMIT_S)
            except queue.Empty:
                raise AssertionError(f"no handoff within {HANDOFF_LIMIT_S} s: {node.agent.stats()}") from None
            assert event.key == ticket.key, event
            assert node is p or isinstance(event, DecodeCommitted), event
            assert getattr(event, "outcome", "committed") == "committed", event
        for group in _GROUPS:
            want, got = p.rows(group, tables[0][group]), d.rows(group, tables[1][group])
            # The last page holds tokens that nobody wanted.
            assert np.array_equal(want[:-1], got[:-1]), f"other bytes in group {group}"
        self.served += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.spent = [*self.spent[-SPENT + 1 :], (ticket.key, ticket.text)]

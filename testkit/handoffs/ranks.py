"""Instances of many ranks without a model: each rank has its own pools, transport and agent."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.handoff.agent.agent import AgentConfig, EngineWatch, HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.digests import MemoryDigester
from baton.handoff.protocol.events import DecodeAdmitted, DecodeCommitted, DecodeProgress, HandoffEvent, PrefillReleased
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.handoff.protocol.ticket import SignedTicket, Ticket, new_transfer_id
from baton.kv.geometry import BLOCK_MAJOR_NHD, Axis, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes, latent_planes
from baton.transports.registry import create_transport
from testkit.handoffs.nodes import KEY, TIMERS
from testkit.handoffs.tickets import signed
from testkit.inside import legs_of

SEEDS = Seeds(first_token=5, draft_token_ids=[6, 7, 8])
NUM_PAGES = 24
LAYERS, DIM = 4, 2
HEADS = {"target": 2, "latent": 1, "draft": 4}
GROUPS = tuple(HEADS)
UNTOUCHED = -1.0


@dataclass(frozen=True)
class Shape:
    """How an instance is cut: tensor ranks, and the first layer of each stage."""

    tp: int = 1
    stages: tuple[int, ...] = (0,)
    page_size: int = 4
    order: tuple[Axis, ...] = BLOCK_MAJOR_NHD
    groups: tuple[str, ...] = GROUPS

    @property
    def num_ranks(self) -> int:
        return self.tp * len(self.stages)

    @property
    def sampling(self) -> int:
        """The last stage's first rank, which also drafts."""
        return self.num_ranks - self.tp

    def geometry(self, rank: int, group: str, region: int) -> Geometry | None:
        """A rank's share of a group: some of the heads, or whole latents, of its stage's layers."""
        stage, shard = divmod(rank, self.tp)
        first, last = (*self.stages, LAYERS)[stage : stage + 2]
        if group == "draft":
            if stage + 1 < len(self.stages):
                return None
            first, last = 0, 1
        heads = HEADS[group]
        spec = GroupSpec(
            name=group,
            owner="draft" if group == "draft" else "target",
            kind="mla" if group == "latent" else "full",
            planes=(
                latent_planes(DIM - 1, 1, "float32")
                if group == "latent"
                else kv_planes(max(1, heads // self.tp), DIM, "float32")
            ),
            page_size=self.page_size,
            layer_ids=tuple(range(first, last)),
            module=int(group == "draft"),
        )
        return Geometry.from_order(spec, NUM_PAGES, self.order, region=region, first_head=shard * heads // self.tp)

    def groups_of(self, rank: int) -> dict[str, RankGeometry]:
        found: dict[str, RankGeometry] = {}
        for group in self.groups:
            geometry = self.geometry(rank, group, len(found))
            if geometry is not None:
                found[group] = RankGeometry(rank=rank, geometry=geometry)
        return found

    def instance(self, rank: int) -> Instance:
        groups: dict[str, list[RankGeometry]] = {}
        for each in range(self.num_ranks):
            for group, found in self.groups_of(each).items():
                groups.setdefault(group, []).append(found)
        return Instance(rank=rank, groups=groups, sampling=self.sampling)


class Rank:
    def __init__(
        self,
        name: str,
        shape: Shape,
        rank: int,
        scheme: str,
        on_event: Callable[[HandoffEvent], None],
        on_peer: Callable[[AttemptKey, Instance], None],
        **config: Any,
    ) -> None:
        self.rank, self.geometries = rank, shape.groups_of(rank)
        self.transport = create_transport(scheme)
        regions = [self.transport.allocate(g, r.geometry.region_bytes) for g, r in self.geometries.items()]
        self.regions = regions
        for region in regions:
            region.view(np.float32)[:] = UNTOUCHED
        on_lost: Callable[[str], None] = config.pop("on_lost", lambda why: None)
        defaults: dict[str, Any] = {"ticket_key": KEY, "timers": TIMERS, "integrity": "full"}
        settings = AgentConfig(name, f"{name}-1", **{**defaults, **config})
        self.agent = HandoffAgent(
            settings,
            shape.instance(rank),
            self.transport,
            self.transport.register(regions),
            on_event,
            MemoryDigester(self.geometries, regions),
            on_peer,
            EngineWatch(on_lost=on_lost),
        )
        self.agent.start()

    def planes(self, group: str) -> list[tuple[tuple[int, ...], range, np.ndarray]]:
        """Per plane the model's layers, the model's heads, and `[layers, pages, page_size, heads, dim]`."""
        geometry = self.geometries[group].geometry
        found = []
        for plane in geometry.planes:
            shape = (geometry.num_layers, geometry.num_pages, geometry.page_size, plane.num_heads, plane.head_dim)
            strides = (
                plane.layer_stride,
                plane.page_stride,
                plane.token_stride,
                plane.head_stride,
                plane.element_stride,
            )
            memory = self.regions[geometry.region].data
            view: np.ndarray = np.ndarray(shape, np.float32, memory, plane.base, strides)
            found.append((geometry.layer_ids, range(plane.first_head, plane.last_head), view))
        return found

    def fill(self, pages: dict[str, list[int]], tokens: int, salt: int) -> None:
        """Give every entry of the first `tokens` its unique value."""
        for group in self.geometries:
            size = self.geometries[group].geometry.page_size
            for index, (layers, heads, view) in enumerate(self.planes(group)):
                for t in range(tokens):
                    view[:, pages[group][t // size], t % size] = values(group, index, layers, heads, t, salt)

    def check(self, pages: dict[str, list[int]], wanted: dict[str, Interval], salt: int) -> None:
        """Check that every wanted entry has arrived, and nothing else was written."""
        for group in self.geometries:
            size = self.geometries[group].geometry.page_size
            for index, (layers, heads, view) in enumerate(self.planes(group)):
                seen = np.full_like(view, UNTOUCHED)
                for t in range(wanted[group].start, wanted[group].stop):
                    seen[:, pages[group][t // size], t % size] = values(group, index, layers, heads, t, salt)
                np.testing.assert_array_equal(view, seen, err_msg=f"rank {self.rank}, group {group}, plane {index}")

    def close(self) -> None:
        self.agent.close()
        self.transport.close()


def values(group: str, plane: int, layers: Sequence[int], heads: range, token: int, salt: int) -> np.ndarray:
    """The unique values of the entries of one token, `[layers, heads, dim]`."""
    at = np.array(layers)[:, None, None] * 2 + plane
    at = (at * 8 + np.array(heads)[None, :, None]) * 256 + token
    found: np.ndarray = (at * DIM + np.arange(DIM)) * 3 + GROUPS.index(group) + 100_000 * salt
    return found.astype(np.float32)


@dataclass
class Engine:
    """One instance: its ranks, the joined agents of all of them, and their events."""

    name: str
    shape: Shape
    schemes: Sequence[str] = ("local://",)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self.progress: list[HandoffEvent] = []
        self.together = InstanceAgent(self.shape.instance(0), self.note)
        told = self.together.on_event, self.together.on_peer
        self.ranks = [
            Rank(self.name, self.shape, rank, self.schemes[rank % len(self.schemes)], *told, **self.config)
            for rank in range(self.shape.num_ranks)
        ]
        self.together.bind([rank.agent for rank in self.ranks])
        self.addresses = [rank.agent.address for rank in self.ranks]

    def note(self, event: HandoffEvent) -> None:
        (self.progress.append if isinstance(event, DecodeProgress) else self.events.put)(event)

    def next(self, kind: type[HandoffEvent]) -> HandoffEvent:
        event = self.events.get(timeout=60)
        assert isinstance(event, kind), event
        return event

    def pages(self, first: int, tokens: int) -> dict[str, list[int]]:
        count = -(-tokens // self.shape.page_size)
        return {group: [first + count - 1 - i + shift for i in range(count)] for shift, group in enumerate(GROUPS)}

    def stats(self, name: str) -> list[int]:
        return [getattr(rank.agent.stats(), name) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def ticket_for(p: Engine, d: Engine, mode: str, **changes: object) -> SignedTicket:
    fields: dict[str, object] = {
        "transfer_id": new_transfer_id(),
        "prefill_engine": p.name,
        "prefill_incarnation": f"{p.name}-1",
        "prefill_addresses": p.addresses,
        "decode_engine": d.name,
        "decode_incarnation": f"{d.name}-1",
        "decode_addresses": d.addresses,
        "mode": mode,
        "prefill_expiry": time.monotonic() + 60,
        "decode_expiry": time.monotonic() + 60,
        "request_digest": bytes(32),
    }
    return signed(Ticket(**{**fields, **changes}), KEY)  # type: ignore[arg-type]


def begin_one(p: Engine, d: Engine) -> AttemptKey:
    """A handoff that P has admitted, and for which D has pages."""
    ticket = ticket_for(p, d, "push")
    p.together.open_prefill(ticket)
    p.together.admit_prefill(ticket.key)
    d.together.announce_decode(ticket)
    while not isinstance(d.events.get(timeout=60), DecodeAdmitted):
        pass
    d.together.open_decode(ticket, 13, wanted_of(13, 0), d.pages(2, 13))
    return ticket.key


def settle(*engines: Engine) -> None:
    """Wait until no attempt is open."""
    until = time.monotonic() + 60
    while any(sum(engine.stats("outstanding")) for engine in engines):
        assert time.monotonic() < until, [rank.agent.stats() for engine in engines for rank in engine.ranks]
        time.sleep(0.005)
    for engine in engines:
        assert not legs_of(engine.together)


def prefill(p: Engine, ticket: SignedTicket, n: int, source: dict[str, list[int]]) -> None:
    """P's leg, from its pages to its seeds; `ticket` is already open."""
    key = ticket.key
    p.together.admit_prefill(key)
    half = n // 2
    p.together.declare_final(key, n, source, {"target": half, "latent": half, "draft": max(0, half - 1)})
    p.together.declare_final(key, n, source, {"target": n, "latent": n, "draft": n - 1})
    p.together.finish_prefill(key, SEEDS, False, {"draft": n})


def wanted_of(n: int, hit: int) -> dict[str, Interval]:
    return {"target": Interval(min(hit, n), n), "latent": Interval(0, n), "draft": Interval(min(hit, n - 1), n)}


def hand_over(
    p: Engine, d: Engine, mode: str, n: int = 13, hit: int = 0, announced: bool = True, salt: int = 0
) -> None:
    """One complete handoff. Checks every byte of every rank of D."""
    ticket = ticket_for(p, d, mode)
    source, dest, wanted = p.pages(1, n), d.pages(2, n), wanted_of(n, hit)
    for rank in p.ranks:
        rank.fill(source, n, salt)
    for rank in d.ranks:
        for region in rank.regions:
            region.view(np.float32)[:] = UNTOUCHED
    if announced:
        d.together.announce_decode(ticket)
    else:
        d.together.open_decode(ticket, n, wanted, dest)
    p.together.open_prefill(ticket)
    prefill(p, ticket, n, source)
    if announced:
        assert d.events.get(timeout=60).key == ticket.key  # admitted
        d.together.open_decode(ticket, n, wanted, dest)
    committed = d.events.get(timeout=60)
    while not isinstance(committed, DecodeCommitted):
        assert type(committed).__name__ == "DecodeAdmitted", committed
        committed = d.events.get(timeout=60)
    assert (committed.key, committed.seeds) == (ticket.key, SEEDS), committed
    for rank in d.ranks:
        rank.check(dest, wanted, salt)
    assert p.next(PrefillReleased) == PrefillReleased(ticket.key, "committed")
    settle(p, d)

"""Engines without a model, for `baton bench handoff`: ranks with memory of a KV cache's shape, transport and agent."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Literal

import msgspec

from baton.errors import ConfigError, HandoffError
from baton.handoff.agent.agent import AgentConfig, HandoffAgent, Timers
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol import events as ev
from baton.kv.geometry import BLOCK_MAJOR_NHD, LAYER_MAJOR_NHD, Axis, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import ITEMSIZE, GroupSpec, Owner, kv_planes
from baton.transports.registry import create_transport

KVLayout = Literal["block", "layer"]
# A page of Baton holds all layers of a group, a page of vLLM one layer.
_ORDERS: dict[KVLayout, tuple[Axis, ...]] = {"block": BLOCK_MAJOR_NHD, "layer": LAYER_MAJOR_NHD}
_EVENT_S = 60.0


class ModelledKV(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV of a target, and of a drafter with one such layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    layout: KVLayout

    def group(self, owner: Owner, num_heads: int) -> GroupSpec:
        return GroupSpec(
            name=owner,
            owner=owner,
            kind="full",
            planes=kv_planes(num_heads, self.head_dim, self.dtype),
            page_size=self.block_size,
            layer_ids=tuple(range(self.num_layers if owner == "target" else 1)),
            module=int(owner == "draft"),
        )

    @property
    def groups(self) -> dict[str, GroupSpec]:
        owners: tuple[Owner, ...] = ("target", "draft")
        return {owner: self.group(owner, self.num_kv_heads) for owner in owners}

    def instance(self, tensor_parallel_size: int, num_pages: int, rank: int = 0) -> Instance:
        """Ranks share the heads. With more ranks than heads, several hold the same one."""
        geometries: dict[str, list[RankGeometry]] = {}
        for region, (name, whole) in enumerate(self.groups.items()):
            for each in range(tensor_parallel_size):
                first = each * self.num_kv_heads // tensor_parallel_size
                stop = max(first + 1, (each + 1) * self.num_kv_heads // tensor_parallel_size)
                geometry = Geometry.from_order(
                    self.group(whole.owner, stop - first),
                    num_pages,
                    _ORDERS[self.layout],
                    region=region,
                    first_head=first,
                )
                geometries.setdefault(name, []).append(RankGeometry(rank=each, geometry=geometry))
        return Instance(rank=rank, groups=geometries, sampling=0)

    def wanted(self, num_tokens: int) -> dict[str, Interval]:
        return {name: group.rules.wanted(num_tokens, 0) for name, group in self.groups.items()}

    def final(self, num_tokens: int, computed: int, *, seeded: bool = False) -> dict[str, int]:
        """As `Rules.final`, if the drafter has computed as much as the target."""
        return {name: group.rules.final(num_tokens, computed, seeded=seeded) for name, group in self.groups.items()}


class ModelledEngine:
    """All ranks, in this process. `events`: handoff events, without progress and admission."""

    def __init__(
        self,
        name: str,
        kv: ModelledKV,
        tensor_parallel_size: int,
        num_pages: int,
        uri: str,
        ticket_key: bytes,
        timers: Timers | None = None,
    ) -> None:
        self.name = name
        self.events: queue.SimpleQueue[ev.HandoffEvent] = queue.SimpleQueue()
        self.together = InstanceAgent(kv.instance(tensor_parallel_size, num_pages), self._note)
        self._transports = [create_transport(uri) for _ in range(tensor_parallel_size)]
        self.agents: list[HandoffAgent] = []
        config = AgentConfig(name, f"{name}-1", ticket_key=ticket_key, timers=timers or Timers())
        for rank, transport in enumerate(self._transports):
            instance = kv.instance(tensor_parallel_size, num_pages, rank)
            regions = [transport.allocate(group, here.geometry.region_bytes) for group, here in instance.own.items()]
            for region in regions:
                region[:] = rank + 1  # the first touch of memory is slow
            descriptor, together = transport.register(regions), self.together
            agent = HandoffAgent(config, instance, transport, descriptor, together.on_event, on_peer=together.on_peer)
            agent.start()
            self.agents.append(agent)
        self.together.bind(self.agents)

    def _note(self, event: ev.HandoffEvent) -> None:
        if not isinstance(event, ev.DecodeProgress | ev.DecodeAdmitted):
            self.events.put(event)

    def next(self, done: Callable[[ev.HandoffEvent], bool]) -> None:
        """Raises `HandoffError` unless `done` accepts the next event."""
        try:
            event = self.events.get(timeout=_EVENT_S)
        except queue.Empty:
            raise HandoffError("not_answering", f"engine {self.name} heard nothing for {_EVENT_S:.0f} s") from None
        if not done(event):
            raise HandoffError("failed", f"engine {self.name}: {event}")

    def copied(self) -> tuple[int, float, float, int]:
        """Totals of the ended copies: bytes, seconds from posting to end, runs, number."""
        figures = [agent.stats().copies for agent in self.agents]
        return (
            sum(sum(one.bytes.values()) for one in figures),
            sum(one.transfer.total for one in figures),
            sum(one.runs.total for one in figures),
            sum(one.transfer.count for one in figures),
        )

    def close(self) -> None:
        HandoffAgent.close_all(self.agents)
        for transport in self._transports:
            transport.close()


def check_modelled(kv: ModelledKV, tensor_parallel_sizes: dict[str, int]) -> None:
    """Raises `ConfigError` for an unknown dtype, or ranks that neither divide the heads nor are a multiple."""
    if kv.dtype not in ITEMSIZE:
        raise ConfigError("dtype", f"{kv.dtype!r} is none of {', '.join(ITEMSIZE)}")
    for field, size in tensor_parallel_sizes.items():
        if size < 1 or (kv.num_kv_heads % size and size % kv.num_kv_heads):
            raise ConfigError(field, f"{size} ranks cannot share {kv.num_kv_heads} KV heads evenly")

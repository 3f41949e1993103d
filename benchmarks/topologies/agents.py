"""Engines that compute as one rank and hand over as several: each rank's agent has a share of the same memory.

A share is the same memory with other strides and counts, so the engine need not know: P's ranks send the pages that the
model wrote, and D's ranks receive those that it continues from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec

from baton.engine.legs import build
from baton.engine.memory.kv_memory import KVMemory
from baton.handoff.agent.agent import AgentConfig, EngineWatch, HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.digests import MemoryDigester
from baton.handoff.protocol.events import HandoffEvent
from baton.kv.geometry import Geometry, Plane
from baton.kv.spec import GroupSpec
from baton.transports.base import Transport
from baton.transports.registry import create_transport
from simulation.topologies import Shape


def edges(num: int, parts: int, index: int) -> tuple[int, int]:
    """`(first, count)` of one of `parts` ranks' share of `num` things. If there are fewer things than ranks, several
    ranks have the same one.
    """
    if num < parts:
        return index * num // parts, 1
    first, stop = index * num // parts, (index + 1) * num // parts
    return first, stop - first


def shard(whole: Geometry, shard: int, tp: int, first_layer: int, num_layers: int) -> Geometry:
    """The part of a geometry that one of `tp` ranks has, in some of its layers."""

    def part(plane: Plane) -> Plane:
        first, count = (0, plane.num_heads) if plane.cut == "whole" else edges(plane.num_heads, tp, shard)
        base = plane.base + first_layer * plane.layer_stride + first * plane.head_stride
        return msgspec.structs.replace(plane, num_heads=count, first_head=plane.first_head + first, base=base)

    return msgspec.structs.replace(
        whole,
        layer_ids=whole.layer_ids[first_layer : first_layer + num_layers],
        planes=tuple(part(plane) for plane in whole.planes),
    ).check()


def cut(groups: Mapping[str, Geometry], owners: Mapping[str, str], shape: Shape) -> dict[str, list[RankGeometry]]:
    """All groups of an engine over its ranks, by group."""
    found: dict[str, list[RankGeometry]] = {}
    for name, whole in groups.items():
        draft = owners[name] == "draft"
        tp, stages = ((shape.draft_tp or shape.tp), 1) if draft else (shape.tp, shape.stages)
        for stage in range(stages):
            first, count = edges(whole.num_layers, stages, stage)
            if whole.num_layers < stages and stage and edges(whole.num_layers, stages, stage - 1)[0] == first:
                continue  # this stage has no layer: it is on the stage before
            for index in range(tp):
                rank = (shape.sampling if draft else stage * shape.tp) + index
                geometry = shard(whole, index, tp, first, count)
                found.setdefault(name, []).append(RankGeometry(rank=rank, geometry=geometry))
    return found


def make(
    shape: Shape,
    identity: AgentConfig,
    whole: Sequence[GroupSpec],
    pool: KVMemory,
    transports: list[Transport],
    emit: Callable[[HandoffEvent], None],
    watch: EngineWatch,
    data_rank: int | None = None,
) -> tuple[list[HandoffAgent], InstanceAgent]:
    """Replaces the function that makes the one agent of an engine with one rank. Appends a transport per further rank
    to the engine's `transports`; regions are those of this process.
    """
    wholes = {
        group.name: Geometry.block_major(group, pool.size.num_pages[group.name], region=index)
        for index, group in enumerate(whole)
    }
    groups = cut(wholes, {group.name: group.owner for group in whole}, shape)
    transports += [create_transport("local://") for _ in range(shape.num_ranks - 1)]
    together = InstanceAgent(Instance(rank=0, groups=groups, sampling=shape.sampling), emit)
    agents = []
    for rank, transport in enumerate(transports):
        here = Instance(rank=rank, groups=groups, sampling=shape.sampling)
        digester = None if identity.integrity == "off" else MemoryDigester(here.own, pool.regions[0])
        descriptor = transport.register(pool.regions[0])
        heard, met = together.on_event, together.on_peer
        agents.append(HandoffAgent(identity, here, transport, descriptor, heard, digester, met, watch))
    together.bind(agents)
    return agents, together


@contextmanager
def shaped(p: Shape, d: Shape) -> Iterator[None]:
    """Engines `p` and `d` that are built in this context have ranks of these shapes."""
    shapes = {"p": p, "d": d}

    def agents(identity: AgentConfig, *rest: Any, **named: Any) -> tuple[list[HandoffAgent], InstanceAgent]:
        return make(shapes[identity.engine_id], identity, *rest, **named)

    with mock.patch.object(build, "make_agents", agents):
        yield

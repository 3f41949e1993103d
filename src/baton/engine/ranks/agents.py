"""The handoff agents of all ranks, in rank 0's process, which can access every rank's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.engine.memory.device_memory import make_digester
from baton.engine.memory.kv_memory import KVMemory
from baton.handoff.agent.agent import AgentConfig, EngineWatch, HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.message_sizes import check_messages
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.events import HandoffEvent
from baton.handoff.session.config import own_bind
from baton.kv.geometry import Geometry
from baton.kv.spec import GroupSpec
from baton.transports.base import Transport


def make_agents(
    identity: AgentConfig,
    whole: Sequence[GroupSpec],
    pool: KVMemory,
    transports: Sequence[Transport],
    emit: Callable[[HandoffEvent], None],
    watch: EngineWatch,
    data_rank: int | None = None,
) -> tuple[list[HandoffAgent], InstanceAgent]:
    """One agent per rank, and the `InstanceAgent` over them. Registers each rank's regions with its transport.

    `whole`: the groups over all ranks. A given control port is rank 0's; the other ranks use the next ports.
    `data_rank`: the number among data-parallel ranks, each an instance with one tensor rank.
    """
    parts: dict[str, list[RankGeometry]] = {group.name: [] for group in whole}
    for rank, held in enumerate(pool.parts):
        for region, (group, first_heads) in enumerate(held):
            pages = pool.size.num_pages[group.name]
            geometry = Geometry.block_major(group, pages, region=region, first_head=first_heads)
            parts[group.name].append(RankGeometry(rank=rank, geometry=geometry, turn=data_rank))
    rules, first = {group.name: group.rules for group in whole}, {name: ranks[0] for name, ranks in parts.items()}
    own_tables = {name: name for name in parts}
    check_messages(pool.size.max_model_len, rules, first, own_tables, identity.integrity)
    instance = InstanceAgent(Instance(rank=0, groups=parts), emit)
    agents = []
    for rank, (transport, regions) in enumerate(zip(transports, pool.regions, strict=True)):
        here = Instance(rank=rank, groups=parts)
        digester = None if identity.integrity == "off" else make_digester(here.own, regions)
        config = replace(identity, bind=own_bind(identity.bind, rank))
        descriptor = transport.register(regions)
        on_event, on_peer = instance.on_event, instance.on_peer
        agents.append(HandoffAgent(config, here, transport, descriptor, on_event, digester, on_peer, watch))
    instance.bind(agents)
    return agents, instance

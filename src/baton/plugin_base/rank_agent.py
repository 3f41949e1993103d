"""The agent of one rank over the engine's own memory, with its transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.errors import ConfigError
from baton.handoff.agent.agent import AgentConfig, HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan.topology import RankGeometry
from baton.handoff.protocol.digests import Digester, MemoryDigester
from baton.handoff.session.config import own_bind
from baton.handoff.session.keys import KeyRing
from baton.plugin_base.config import EngineSettings
from baton.plugin_base.ranks import JoinedWorkers
from baton.transports.base import DeviceMemory, Region, Transport
from baton.transports.registry import create_transport


def start_agent(
    settings: EngineSettings,
    engine_id: str,
    ticket_key: bytes,
    rank: int,
    whole: JoinedWorkers,
    regions: Sequence[Region],
    geometries: Mapping[str, RankGeometry],
    together: InstanceAgent,
) -> tuple[HandoffAgent, Transport]:
    """Register `regions`, and start the agent of rank `rank`, which `together` combines with those of other ranks.

    Raises `ConfigError` for digests of a GPU's memory.
    """
    transport = create_transport(settings.kv_transport)
    agent = HandoffAgent(
        AgentConfig(
            engine_id=engine_id,
            incarnation=whole.incarnation,
            bind=own_bind(settings.control_bind, rank),
            fingerprint=whole.facts,
            ticket_key=ticket_key,
            keys=KeyRing(settings.keys, engine_id),
            timers=settings.timers,
            integrity=settings.integrity,
            max_retries=settings.max_retries,
        ),
        whole.instance,
        transport,
        transport.register(regions),
        together.on_event,
        digester_of(settings, regions, geometries),
        on_peer=together.on_peer,
    )
    together.bind([agent])
    agent.start()
    return agent, transport


def digester_of(
    settings: EngineSettings, regions: Sequence[Region], geometries: Mapping[str, RankGeometry]
) -> Digester | None:
    """None if digests are off. Raises `ConfigError` for a GPU's memory."""
    if settings.integrity == "off":
        return None
    memory = [region for region in regions if not isinstance(region, DeviceMemory)]
    if len(memory) < len(regions):
        raise ConfigError("integrity", "digests are taken of KV in the host's memory, not in a GPU's")
    return MemoryDigester(geometries, memory)

"""Builds the agents of an engine's ranks, and its legs."""

from __future__ import annotations

from collections.abc import Sequence

from baton.drafters.base import num_modules
from baton.engine.config import EngineConfig
from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.legs.layer_stream import LayerStream
from baton.engine.legs.leg import LegSettings
from baton.engine.loading.checkpoints import Loaded
from baton.engine.mailbox import Mailbox
from baton.engine.memory.kv_memory import KVMemory
from baton.engine.metrics import EngineMetrics
from baton.engine.ranks.agents import make_agents
from baton.engine.request import Request
from baton.engine.sampling.stopping import until_stop
from baton.engine.scheduler import Scheduler
from baton.engine.step import DecodingLimits
from baton.errors import HandoffError
from baton.handoff.agent.agent import AgentConfig, EngineWatch, HandoffAgent, Timers
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.leg_events import Agent
from baton.handoff.protocol.messages import MAX_DRAFTS
from baton.handoff.session.config import DEFAULT_MAX_RETRIES, own_bind
from baton.handoff.session.keys import KeyRing
from baton.kv.spec import GroupSpec
from baton.transports.base import Transport
from baton.transports.registry import default_integrity
from baton.wire import Integrity


def agent_config(
    config: EngineConfig, incarnation: str, facts: dict[str, str], ticket_key: bytes, keys: KeyRing | None
) -> AgentConfig:
    return AgentConfig(
        engine_id=config.engine_id,
        incarnation=incarnation,
        bind=own_bind(config.kv_transfer_config.control_bind, config.data_parallel_rank),
        fingerprint=facts,
        ticket_key=ticket_key,
        keys=keys,
        timers=Timers(handoff=config.kv_transfer_config.handoff_timeout_s),
        integrity=_integrity_of(config),
        max_retries=0 if config.recovery == "none" else DEFAULT_MAX_RETRIES,
    )


def build_agents(
    config: EngineConfig,
    identity: AgentConfig,
    whole: Sequence[GroupSpec],
    pool: KVMemory,
    transports: Sequence[Transport],
    mailbox: Mailbox,
) -> tuple[list[HandoffAgent], InstanceAgent]:
    watch = EngineWatch(
        is_stalled=lambda: mailbox.busy_s() > config.stall_timeout_s,
        on_lost=lambda why: mailbox.post(HandoffError("agent_lost", why)),
    )
    return make_agents(
        identity,
        whole,
        pool,
        transports,
        emit=mailbox.post,
        watch=watch,
        data_rank=config.data_parallel_rank if config.data_parallel_size > 1 else None,
    )


def build_legs(
    config: EngineConfig,
    agent: Agent,
    groups: Sequence[GroupSpec],
    scheduler: Scheduler,
    loaded: Loaded,
    limits: DecodingLimits,
    transport: Transport,
) -> HandoffLegs:
    def ends(request: Request, token: int) -> bool:
        return until_stop(request, [token], limits.eos_ids, limits.max_model_len)[1] is not None

    spec = config.speculative_config
    settings = LegSettings(
        vocab_size=loaded.model.vocab_size,
        max_drafts=config.num_drafts if spec is not None and spec.drafts_alike else MAX_DRAFTS,
        recovery=config.recovery,
        handoff_timeout_s=config.kv_transfer_config.handoff_timeout_s,
        drafter_state_bytes=(num_modules(loaded.drafter) - 1) * loaded.model.hidden_size * 4,
        kv_stream=config.kv_stream,
        integrity=_integrity_of(config),
    )
    layers = None
    # Elsewhere a reported layer is only queued.
    if config.kv_stream != "off" and config.device == "cpu":
        layers = LayerStream(agent, scheduler.cache, groups, config.num_ranks > 1, config.kv_stream == "layer")
    alter_seeds = getattr(transport, "alter_seeds", None)
    return HandoffLegs(agent, scheduler, EngineMetrics(), ends, settings, layers=layers, alter_seeds=alter_seeds)


def _integrity_of(config: EngineConfig) -> Integrity:
    if config.integrity == "auto":
        return default_integrity(config.kv_transfer_config.kv_transport)
    return config.integrity

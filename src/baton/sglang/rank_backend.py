"""Starts the plug-in in a scheduler process."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.handoff.agent.agent import HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.message_sizes import check_messages
from baton.handoff.protocol.frames import PROTOCOL_VERSION
from baton.handoff.protocol.ticket import Redeemer
from baton.plugin_base.rank_agent import start_agent
from baton.plugin_base.ranks import WorkerPart, join_workers
from baton.sglang import compat
from baton.sglang.config import read_config
from baton.sglang.geometry import describe_buffers
from baton.sglang.legs import RankLegs
from baton.sglang.pools import buffers
from baton.sglang.seeds import MetadataRows
from baton.transports.base import Transport
from baton.transports.registry import transport_name
from baton.wire import SglangIdentity

_AGENT_COUNTS = ("retries", "repairs", "bad_pieces", "lost_leases", "outstanding", "quarantined")


@dataclass(frozen=True, slots=True)
class RankBackend:
    """`identity`: the engine's. `num_ranks`: its tensor ranks."""

    num_ranks: int
    legs: RankLegs
    rows: MetadataRows
    identity: SglangIdentity
    agent: HandoffAgent
    transport: Transport

    def counts(self) -> dict[str, int]:
        stats = self.agent.stats()
        return {**self.legs.counts, **{name: getattr(stats, name) for name in _AGENT_COUNTS}}

    def close(self) -> None:
        self.agent.close()
        self.transport.close()


def start_rank_backend(args: Any, mode: str, server: Any, queue: Any) -> RankBackend:
    """`args`: SGLang's `KVArgs`; `mode`: `prefill` or `decode`; `queue`: the scheduler's, which makes the manager.

    Collective. Raises `ConfigError`.
    """
    settings = read_config(os.environ)
    version, model = compat.check_version(), queue.scheduler.model_config
    rank, num_ranks = compat.tensor_rank()
    data_rank = compat.data_rank()
    engine_id = settings.engine_id if data_rank is None else f"{settings.engine_id}_dp{data_rank}"
    region, turn = compat.region_maker(server, args), (data_rank or 0) * num_ranks + rank
    layout = describe_buffers(buffers(args, compat.pools_of(queue)), args.page_size, rank, region, turn)
    longest = int(model.context_len)
    check_messages(longest, layout.rules, layout.geometries, layout.shared, settings.integrity)
    part = WorkerPart(
        rank=rank,
        incarnation=secrets.token_hex(8),
        geometries=layout.geometries,
        facts=compat.facts(queue.scheduler, args, version),
        has_states=any(rules.kind == "state" for rules in layout.rules.values()),
    )
    whole = join_workers(part, lambda own: compat.gather_ranks(queue, own))
    key = settings.ticket_key()
    legs = RankLegs(layout, Redeemer(key, engine_id, whole.incarnation), compat.synchronizer(server))
    together = InstanceAgent(whole.instance, legs.post)
    agent, transport = start_agent(settings, engine_id, key, turn, whole, layout.regions, layout.geometries, together)
    legs.bind(together)
    addresses = [each.decode() for each in compat.gather_ranks(queue, agent.address.encode())]
    identity = SglangIdentity(
        engine_id=engine_id,
        incarnation=whole.incarnation,
        control_addresses=addresses,
        fingerprint=msgspec.json.encode(whole.facts, order="deterministic").decode(),
        role=mode,
        vocab_size=int(model.vocab_size),
        eos_token_ids=compat.eos_token_ids(model),
        num_speculative_tokens=compat.num_speculative_tokens(server),
        max_model_len=longest,
        kv_transport=transport_name(settings.kv_transport),
        protocol=PROTOCOL_VERSION,
        data_parallel_rank=data_rank,
    )
    return RankBackend(num_ranks, legs, compat.metadata_rows(args), identity, agent, transport)

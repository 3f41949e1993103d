"""A worker's KV cache, registered, and its agent."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.handoff.agent.agent import HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.message_sizes import check_messages
from baton.handoff.protocol.frames import PROTOCOL_VERSION
from baton.plugin_base.rank_agent import start_agent
from baton.plugin_base.ranks import JoinedWorkers, WorkerPart, join_workers
from baton.transports.base import Transport
from baton.transports.registry import transport_name
from baton.vllm import caches, compat, support
from baton.vllm.config import PluginConfig
from baton.vllm.handoff_span import span_maker
from baton.vllm.memory.geometry import CacheLayout, describe_caches
from baton.vllm.memory.groups import split_tables
from baton.vllm.memory.scales import describe_scales, worker_scales
from baton.vllm.worker import WorkerSide
from baton.wire import VllmIdentity

_ROLES = {
    "kv_producer": ["prefill"],
    "kv_consumer": ["decode"],
    "kv_both": ["prefill", "decode"],
}


@dataclass(frozen=True, slots=True)
class OpenCache:
    """One worker's registered KV cache. `rank`: among all workers of the engine. `identity`: the engine's, with this
    worker's address. `draft_layers`: vLLM's names of the drafter's layers here. `window_tile`: tokens of windows
    that move as one piece."""

    side: WorkerSide
    rank: int
    identity: VllmIdentity
    agent: HandoffAgent
    transport: Transport
    draft_layers: tuple[str, ...] = ()
    window_tile: int = 1

    def close(self) -> None:
        self.agent.close()
        self.transport.close()


def open_cache(
    config: Any, settings: PluginConfig, kv_cache_config: Any, kv_caches: Mapping[str, Any], version: str
) -> OpenCache:
    """Collective over the engine's workers.

    Raises `ConfigError`.
    """
    engine_id, rank = str(config.kv_transfer_config.engine_id), compat.worker_number(config)
    tables, draft_module = caches.split_cache_groups(kv_cache_config), compat.draft_module(config)
    groups = split_tables(tables, compat.num_target_layers(config), draft_module)
    layers = {layer: kv_caches[layer] for group in groups for layer in group.layers}
    kernels = {layer: caches.kernel_layout(config, layer) for layer in layers}
    heads, stages = compat.worker_heads(config), compat.num_stages(config)
    states = caches.state_parts(config, (layer for g in groups if g.kind == "state" for layer in g.layers))
    layout = describe_caches(layers, groups, kernels, settings.granularity, heads, stages, states)
    check_messages(
        int(config.model_config.max_model_len),
        {group.name: group.rules for group in layout.groups},
        layout.geometries,
        layout.shared_tables,
        settings.integrity,
    )
    facts = compat.facts(config, version)
    facts["output.first_step"] = str(settings.first_step)
    own = worker_scales(config.compilation_config.static_forward_context, layout)
    facts["cache.scales"] = describe_scales(compat.gather_workers(config, own))
    for group in layout.groups:
        facts[f"group.{group.name}.layout"] = caches.layout_name(config, group.layers[0])
        facts[f"group.{group.name}.window"] = str(group.window)
    part = WorkerPart(
        rank=rank,
        incarnation=secrets.token_hex(8),
        geometries=layout.geometries,
        facts=facts,
        has_states=any(group.kind == "state" for group in layout.groups),
    )
    whole = join_workers(part, lambda own: compat.gather_workers(config, own))
    side = _worker_side(config, settings, layout, rank)
    together = InstanceAgent(whole.instance, side.post)
    with _unbound(config):
        agent, transport = start_agent(
            settings, engine_id, settings.ticket_key(), rank, whole, layout.regions, layout.geometries, together
        )
    side.bind(together)
    draft_layers = tuple(layer for group in groups if group.owner == "draft" for layer in group.layers)
    tile = max((rank.geometry.tile for rank in layout.geometries.values()), default=0)
    windows = [group.name for group in layout.groups if group.window is not None]
    window_tile = min((layout.geometries[name].geometry.tile for name in windows), default=1)
    # vLLM looks for the same prefix in all groups.
    block = math.lcm(*(group.block_size for group in groups)) if windows else 1
    identity = _identity(config, settings.kv_transport, whole, agent.address, tile, block)
    return OpenCache(side, rank, identity, agent, transport, draft_layers, window_tile)


def _worker_side(config: Any, settings: PluginConfig, layout: CacheLayout, rank: int) -> WorkerSide:
    alone = support.steps_in_turn(config)
    return WorkerSide(
        layout,
        compat.zeroes_before_preemptions(config),
        kv_stream=support.stream_of(config, settings.kv_stream),
        # One span per handoff, for any number of ranks.
        on_decode_end=span_maker(settings.integrity) if rank == 0 else None,
        alone=alone,
        requests=compat.request_queue() if alone else None,
    )


def _identity(
    config: Any, kv_transport: str, whole: JoinedWorkers, address: str, tile: int, window_block: int
) -> VllmIdentity:
    """`window_block`: its tokens; 1 without windows."""
    transfer = config.kv_transfer_config
    return VllmIdentity(
        engine_id=str(transfer.engine_id),
        incarnation=whole.incarnation,
        control_addresses=[address],
        fingerprint=json.dumps(whole.facts, sort_keys=True),
        truncate_prefill=whole.has_states,
        prefill_multiple=compat.prefill_multiple(config),
        tile=tile,
        roles=_ROLES[transfer.kv_role],
        vocab_size=config.model_config.get_vocab_size(),
        eos_token_ids=compat.eos_token_ids(config),
        num_speculative_tokens=compat.num_speculative_tokens(config),
        data_parallel_rank=compat.data_parallel_rank(config),
        sampling_defaults=compat.sampling_defaults(config),
        kv_transport=transport_name(kv_transport),
        protocol=PROTOCOL_VERSION,
        moves_prefixes=compat.has_prefix_cache(config) and not whole.has_states,
        prefix_multiple=window_block,
        # vLLM drops the last block that it finds, and looks for the window before that.
        prefix_extra=window_block if window_block > 1 and compat.drops_last_block(config) else 0,
    )


@contextlib.contextmanager
def _unbound(config: Any) -> Iterator[None]:
    """Let threads started in this context run on all cores of the parent process: vLLM binds its CPU worker's thread to
    dedicated cores, for which they would compete.
    """
    if config.device_config.device_type != "cpu":
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)

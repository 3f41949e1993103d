"""Puts one engine together: checkpoint, drafter, groups, pages; for handoffs the transport and the agent."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.drafters.base import Drafter
from baton.drafters.registry import load_drafter
from baton.engine.attention import get_backend
from baton.engine.config import EngineConfig
from baton.engine.core import EmitChunk, EngineCore
from baton.engine.facts import engine_facts
from baton.engine.handoff import HandoffLegs
from baton.engine.metrics import EngineMetrics
from baton.engine.pool_size import Memory, pool_size
from baton.engine.prefix_store import PrefixStore
from baton.engine.runner import ModelRunner
from baton.engine.scheduler import Scheduler
from baton.engine.stopping import until_stop
from baton.errors import ConfigError
from baton.handoff.channel.config import DEFAULT_MAX_RETRIES
from baton.handoff.channel.keys import KeyRing
from baton.handoff.node.agent import AgentConfig, HandoffAgent, Timers
from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol.digests import MemoryDigester
from baton.handoff.protocol.ticket import Redeemer, load_or_create_key
from baton.kv.cache import KVCache
from baton.kv.geometry import Geometry, GroupSpec, Owner
from baton.kv.interval import Kind
from baton.models.base import CausalLM
from baton.models.layers import KVLayerSpec
from baton.models.loader import load_model, read_config
from baton.text import Tokenizer
from baton.transports.base import Transport
from baton.transports.registry import create_transport, default_integrity
from baton.transports.shm import ShmTransport
from baton.transports.store import open_store
from baton.wire import EngineInfo

log = logging.getLogger(__name__)

DRAFT_GROUP = "draft"
# To be counted on when stored pages of before mean something else now.
PAGE_LAYOUT = "block-major 1"
# Every drafter here computes its entry at position i from token i + 1.
DRAFT_MODULE = 1


@dataclass(slots=True)
class Engine:
    """A ready engine. `agent`, `transport` and `redeemer` are None without handoffs."""

    info: EngineInfo
    core: EngineCore
    tokenizer: Tokenizer
    agent: HandoffAgent | None
    transport: Transport | None
    redeemer: Redeemer | None

    def close(self) -> None:
        """End the agent's thread and give the pool's memory back."""
        if self.agent is not None:
            self.agent.close()
        if self.core.prefix_store is not None:
            self.core.prefix_store.close()
        # The pool is a view of the transport's memory.
        self.core.runner.kv.clear()
        if self.transport is not None:
            self.transport.close()


def build_engine(config: EngineConfig, emit: EmitChunk, progress: Callable[[str], None] = lambda text: None) -> Engine:
    """Raises ConfigError, CheckpointError or TransportError with one clear line. `progress` gets start-up steps."""
    with contextlib.ExitStack() as undo:
        engine = _build(config, emit, progress, undo)
        undo.pop_all()
    return engine


def _build(
    config: EngineConfig, emit: EmitChunk, progress: Callable[[str], None], undo: contextlib.ExitStack
) -> Engine:
    config.check()
    keys = KeyRing(config.keys, config.engine_id) if config.keys else None
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda is not available here")
    # Before what takes long, so that a library that is missing is told at once.
    ticket_key = load_or_create_key(config.ticket_key_path) if config.ticket_key_path else None
    transport = create_transport(config.kv_transfer_config.kv_transport) if ticket_key else None
    if transport is not None:
        undo.callback(transport.close)
    uses_shm = transport is not None and transport.scheme.rpartition("+")[2] == ShmTransport.scheme
    memory = Memory.measure(device, uses_shm)
    progress(f"loading target {config.model}")
    hf_config = read_config(config.model)
    model = load_model(config.model, config.dtype, config.device, config.batch_invariant)
    tokenizer = Tokenizer.load(config.model)
    spec = config.speculative_config
    drafter: Drafter | None = None
    if spec is not None:
        progress(f"loading drafter {spec.model} ({spec.method})")
        drafter = load_drafter(spec.method, spec.model, model, config.dtype, config.device, config.batch_invariant)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    groups = _groups(model.kv_layers, "target", config.block_size, dtype)
    if drafter is not None:
        groups += _groups(drafter.kv_layers, "draft", config.block_size, dtype)
    page_bytes = sum(group.page_bytes for group in groups)
    num_lookahead_slots = spec.num_speculative_tokens if spec else 0
    max_position = _max_position(config, model)
    size = pool_size(config, memory, Memory.measure(device, uses_shm), page_bytes, num_lookahead_slots, max_position)
    num_pages, max_model_len = size.num_pages, size.max_model_len
    if size.lowered:
        log.warning("%s", size)
    progress(f"{size}; allocating {num_pages} pages of {config.block_size} tokens, {page_bytes * num_pages >> 20} MiB")
    regions, kv = _allocate(groups, num_pages, transport, device)
    backend = get_backend(config.attention_backend, config.device)
    runner = ModelRunner(
        model, drafter, groups, kv, backend, device, num_lookahead_slots, spec is None or spec.verifier == "coupled"
    )
    cache = KVCache(
        groups,
        dict.fromkeys((group.name for group in groups), num_pages),
        num_lookahead_slots,
        runner.copy_page,
        config.enable_prefix_caching,
    )
    scheduler = Scheduler(cache, config.max_num_batched_tokens, config.max_num_seqs)
    incarnation = secrets.token_hex(8)
    facts = engine_facts(config, hf_config, groups, model, drafter, backend)
    agent: HandoffAgent | None = None
    legs: HandoffLegs | None = None
    core: EngineCore
    if transport is not None and ticket_key is not None:
        uri = config.kv_transfer_config.kv_transport
        integrity = default_integrity(uri) if config.integrity == "auto" else config.integrity
        geometries = {
            group.name: RankGeometry(rank=0, geometry=Geometry.block_major(group, num_pages, region=index))
            for index, group in enumerate(groups)
        }
        agent = HandoffAgent(
            AgentConfig(
                engine_id=config.engine_id,
                incarnation=incarnation,
                bind=config.kv_transfer_config.control_bind,
                fingerprint=facts,
                ticket_key=ticket_key,
                keys=keys,
                timers=Timers(handoff=config.kv_transfer_config.handoff_timeout_s),
                integrity=integrity,
                max_retries=0 if config.recovery == "none" else DEFAULT_MAX_RETRIES,
            ),
            geometries,
            transport,
            transport.register(regions),
            lambda event: core.post(lambda: core.on_handoff(event)),
            None if integrity == "off" else MemoryDigester(geometries, regions),
            lambda: core.busy_s() > config.stall_timeout_s,
        )
        undo.callback(agent.close)
        timeout_s = config.kv_transfer_config.handoff_timeout_s
        alter_seeds = getattr(transport, "alter_seeds", None)
        eos_ids = frozenset(tokenizer.eos_token_ids)
        legs = HandoffLegs(
            agent,
            scheduler,
            EngineMetrics(),
            lambda request, token: until_stop(request, [token], eos_ids, max_model_len)[1] is not None,
            model.vocab_size,
            num_lookahead_slots,
            config.recovery,
            timeout_s,
            alter_seeds,
        )
    rejection = spec is not None and spec.verifier == "rejection"
    prefix_store = _prefix_store(config, facts, cache, kv)
    core = EngineCore(
        runner,
        scheduler,
        legs,
        tokenizer.eos_token_ids,
        max_model_len,
        rejection,
        emit,
        prefix_store,
        config.queue_timeout_s,
    )
    if agent is not None:
        agent.start()
    info = EngineInfo(
        engine_id=config.engine_id,
        incarnation=incarnation,
        role=config.role,
        model=config.served_model_name or Path(config.model).name,
        model_path=str(Path(config.model).resolve()),
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=list(tokenizer.eos_token_ids),
        control_address=agent.address if agent else None,
        fingerprint=json.dumps(facts, sort_keys=True),
        num_speculative_tokens=num_lookahead_slots,
        batch_invariant=config.batch_invariant,
        default_seed=config.seed,
        token_api=config.role != "both" or config.token_api,
    )
    redeemer = Redeemer(ticket_key, config.engine_id, incarnation) if ticket_key else None
    return Engine(info, core, tokenizer, agent, transport, redeemer)


def _max_position(config: EngineConfig, model: CausalLM) -> int:
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError("max_model_len", f"must be at most the checkpoint's {model.max_position}")
    return model.max_position


def _groups(layers: Sequence[KVLayerSpec], owner: Owner, page_size: int, dtype: str) -> list[GroupSpec]:
    """Layers that share window, heads and head size form one group. The drafter's layers are one group."""
    by_spec: dict[KVLayerSpec, list[int]] = {}
    for layer_id, layer in enumerate(layers):
        by_spec.setdefault(layer, []).append(layer_id)
    if owner == "draft" and len(by_spec) > 1:
        raise ConfigError("speculative_config.model", "a drafter's layers must share one attention geometry")
    groups: list[GroupSpec] = []
    for layer, ids in by_spec.items():
        kind: Kind = "full" if layer.window is None else "sliding_window"
        groups.append(
            GroupSpec(
                name=DRAFT_GROUP if owner == "draft" else f"target.{kind}" + (f".{len(groups)}" if groups else ""),
                owner=owner,
                module=DRAFT_MODULE if owner == "draft" else 0,
                kind=kind,
                num_layers=len(ids),
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                page_size=page_size,
                dtype=dtype,
                window=layer.window,
                layer_ids=tuple(ids),
            )
        )
    return groups


def _allocate(
    groups: Sequence[GroupSpec], num_pages: int, transport: Transport | None, device: torch.device
) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    regions: list[np.ndarray] = []
    kv: dict[str, Tensor] = {}
    for group in groups:
        shape = (num_pages, group.num_layers, 2, group.page_size, group.num_kv_heads, group.head_dim)
        dtype = getattr(torch, group.dtype)
        if transport is None:
            kv[group.name] = torch.zeros(shape, dtype=dtype, device=device)
            continue
        if device.type != "cpu":
            raise ConfigError("kv_transfer_config.kv_transport", f"{transport.scheme} moves host memory only")
        region = transport.allocate(group.name, num_pages * group.page_bytes)
        regions.append(region)
        kv[group.name] = torch.from_numpy(region).view(dtype).view(shape)
    return regions, kv


def _prefix_store(
    config: EngineConfig, facts: dict[str, str], cache: KVCache, kv: dict[str, Tensor]
) -> PrefixStore | None:
    uri = config.kv_transfer_config.prefix_store
    if uri is None:
        return None
    # Pages are stored as they lie in memory.
    model = json.dumps({**facts, "block_size": config.block_size, "layout": PAGE_LAYOUT}, sort_keys=True)
    return PrefixStore(open_store(uri), model, cache.pools, kv, writes=config.role != "decode")

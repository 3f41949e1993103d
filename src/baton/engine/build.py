"""Builds one engine."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.engine.attention.registry import get_backend
from baton.engine.config import EngineConfig
from baton.engine.core import EmitChunk, EngineCore
from baton.engine.executor import Executor, LocalExecutor
from baton.engine.info import engine_info
from baton.engine.legs.build import agent_config, build_agents, build_legs
from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.loading.checkpoints import Loaded, load_checkpoints
from baton.engine.loading.engine_facts import engine_facts
from baton.engine.mailbox import Mailbox
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.memory.kv_memory import KVMemory, kv_memory, model_groups
from baton.engine.memory.pool_size import Memory
from baton.engine.prompt_budget import PromptBudget
from baton.engine.ranks.collective import expert_ranks
from baton.engine.ranks.followers import Followers, start_followers
from baton.engine.ranks.lockstep import Lockstep, WakeSockets
from baton.engine.ranks.rank_executor import RankExecutor
from baton.engine.runner import ModelRunner, plan_spec
from baton.engine.scheduler import Scheduler
from baton.engine.speculation.start import enable_adaptive_drafts
from baton.engine.step import DecodingLimits
from baton.errors import ConfigError, EngineUnavailableError
from baton.handoff.agent.agent import HandoffAgent
from baton.handoff.protocol.ticket import Redeemer, load_or_create_key
from baton.handoff.session.keys import KeyRing
from baton.kv.cache import KVCache
from baton.kv.spec import GroupSpec
from baton.kvevents.publisher import EventPublisher
from baton.kvstore.prefix_store import PrefixStore
from baton.kvstore.store import FileStore
from baton.structured import Grammars
from baton.text import Tokenizer
from baton.transports.base import Transport
from baton.transports.mapped.shm import ShmTransport
from baton.transports.registry import create_transport
from baton.wire import EngineInfo

log = logging.getLogger(__name__)

# Part of stored prefixes' keys. Change it with the meaning of a page's bytes.
PAGE_LAYOUT = "block-major 1"


@dataclass(slots=True)
class Engine:
    """`agents` and `transports`: of its ranks; empty without handoffs. `grammars`: as `Loaded`."""

    info: EngineInfo
    core: EngineCore
    tokenizer: Tokenizer
    agents: Sequence[HandoffAgent]
    transports: Sequence[Transport]
    redeemer: Redeemer | None
    grammars: Grammars | None = None
    events: EventPublisher | None = None

    @property
    def agent(self) -> HandoffAgent | None:
        return self.agents[0] if self.agents else None

    def close(self) -> None:
        """Frees pool and weights now: reference cycles would delay that."""
        HandoffAgent.close_all(self.agents)
        if self.core.prefix_store is not None:
            self.core.prefix_store.close()
        if self.grammars is not None:
            self.grammars.close()
        if self.events is not None:
            self.events.close()
        self.core.peers.close()
        # The pool is a view of the transport's memory.
        self.core.executor.close()
        for transport in self.transports:
            transport.close()


def build_engine(
    config: EngineConfig,
    emit: EmitChunk,
    progress: Callable[[str], None] = lambda text: None,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """Raises `ConfigError`, `CheckpointError` or `TransportError`. `progress` gets start-up steps."""
    with contextlib.ExitStack() as undo:
        engine = _build(config, emit, _Start(progress, tokenizer, undo))
        undo.pop_all()
    return engine


@dataclass(frozen=True, slots=True)
class _Start:
    progress: Callable[[str], None]
    tokenizer: Tokenizer | None
    undo: contextlib.ExitStack


@dataclass(frozen=True, slots=True)
class _Computing:
    """`whole`: over all ranks. `peers`: the other data-parallel ranks, if they share experts."""

    loaded: Loaded
    executor: Executor
    followers: Followers
    peers: Lockstep | None
    whole: list[GroupSpec]
    pool: KVMemory
    facts: dict[str, str]


def _scheduler(config: EngineConfig, cache: KVCache) -> Scheduler:
    most = config.max_prefill_tokens_with_decodes
    scheduler = Scheduler(cache, config.max_num_batched_tokens, config.max_num_seqs, most)
    if config.max_decode_gap_s:
        scheduler.prompt_budget = PromptBudget(config.max_decode_gap_s, most)
    return scheduler


def _build(config: EngineConfig, emit: EmitChunk, start: _Start) -> Engine:
    config.check()
    undo = start.undo
    keys = KeyRing(config.keys, config.engine_id) if config.keys else None
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda is not available here")
    # Before loading weights: a missing library fails at once.
    ticket_key = load_or_create_key(config.ticket_key_path) if config.ticket_key_path else None
    transports: list[Transport] = []
    for _ in range(config.num_ranks if ticket_key else 0):
        transports.append(create_transport(config.kv_transfer_config.kv_transport))
        undo.callback(transports[-1].close)
    computing = _load(config, device, transports, start)
    loaded, pool, facts = computing.loaded, computing.pool, computing.facts
    cache = KVCache(
        computing.whole,
        pool.size.num_pages,
        config.num_lookahead_slots,
        computing.executor.copy_page,
        config.enable_prefix_caching,
        config.mamba_block_size,
    )
    events = _events(config, cache, computing.whole, undo)
    scheduler = _scheduler(config, cache)
    spec, eos_ids = config.speculative_config, frozenset(loaded.tokenizer.eos_token_ids)
    rejection = spec is not None and spec.verifier == "rejection"
    limits = DecodingLimits(eos_ids, pool.size.max_model_len, config.num_drafts, rejection)
    mailbox, incarnation = Mailbox(), secrets.token_hex(8)
    agents: Sequence[HandoffAgent] = ()
    legs: HandoffLegs | None = None
    if transports and ticket_key is not None:
        identity = agent_config(config, incarnation, facts, ticket_key, keys)
        agents, instance = build_agents(config, identity, computing.whole, pool, transports, mailbox)
        for agent in agents:
            undo.callback(agent.close)
        legs = build_legs(config, instance, computing.whole, scheduler, loaded, limits, transports[0])
    core = EngineCore(
        computing.executor,
        scheduler,
        legs,
        limits,
        emit,
        prefix_store=_prefix_store(config, facts, cache, pool.kv),
        queue_timeout_s=config.queue_timeout_s,
        mailbox=mailbox,
    )
    if computing.peers is not None:
        core.peers = computing.peers
        computing.peers.wake_sockets.listen(lambda: mailbox.post(lambda: None))
    for agent in agents:
        agent.start()
    computing.followers.watch(lambda cause: mailbox.post(EngineUnavailableError(cause)))
    enable_adaptive_drafts(config, core, pool.size.max_model_len)
    addresses = [agent.address for agent in agents]
    info = engine_info(config, loaded, pool.size, facts, incarnation, addresses, cache, events)
    redeemer = Redeemer(ticket_key, config.engine_id, incarnation) if ticket_key else None
    return Engine(info, core, loaded.tokenizer, agents, transports, redeemer, loaded.grammars, events)


def _events(
    config: EngineConfig, cache: KVCache, whole: Sequence[GroupSpec], undo: contextlib.ExitStack
) -> EventPublisher | None:
    if not config.kv_events_config.enabled:
        return None
    events = EventPublisher(
        config.kv_events_config, config.data_parallel_rank if config.data_parallel_size > 1 else None
    )
    undo.callback(events.close)
    events.watch(cache, whole)
    return events


def _load(config: EngineConfig, device: torch.device, transports: Sequence[Transport], start: _Start) -> _Computing:
    progress, undo = start.progress, start.undo
    uses_shm = bool(transports) and transports[0].scheme.rpartition("+")[2] == ShmTransport.scheme
    memory = Memory.measure(device, uses_shm)
    followers = start_followers(config, progress)
    undo.callback(followers.close)
    peers = _join(config, undo)
    place = replace(followers.join(), experts=None if peers is None else peers.shared)
    loaded = load_checkpoints(config, progress, place, start.tokenizer)
    model, drafter = loaded.model, loaded.drafter
    if peers is not None and peers.shared.num_layers == 0:
        # Without experts, data-parallel ranks are independent engines.
        peers.close()
        peers = None
    whole = model_groups(config, model, drafter)
    followers.answered()
    pool = kv_memory(config, whole, model.config.num_layers, model.max_position, memory, uses_shm, transports, progress)
    own = [group for group, _ in pool.parts[0]]
    followers.send_allocation(pool, drafter)
    backend = get_backend(config.attention_backend, config.device)
    if config.batch_invariant:
        progress("probing numerics, which compiles kernels at their first use")
    facts = engine_facts(config, loaded.hf_config, whole, own, model, drafter, backend, loaded.tokenizer.eos_token_ids)
    followers.answered()
    local = LocalExecutor(ModelRunner(model, drafter, own, pool.kv, backend, device, loaded.grammars))
    executor: Executor = local
    if config.num_ranks > 1:
        executor = RankExecutor(local, followers, plan_spec(whole, drafter))
    return _Computing(loaded, executor, followers, peers, whole, pool, facts)


def _join(config: EngineConfig, undo: contextlib.ExitStack) -> Lockstep | None:
    if config.data_parallel_size == 1:
        return None
    if config.data_parallel_store is None:
        what = f"is {config.data_parallel_size}: ranks are started together, by baton serve and baton up"
        raise ConfigError("data_parallel_size", what)
    wake_sockets = WakeSockets(config.data_parallel_store, config.data_parallel_rank, config.data_parallel_size)
    undo.callback(wake_sockets.close)
    return Lockstep(expert_ranks(config, str(Path(config.data_parallel_store) / "store")), wake_sockets)


def _prefix_store(
    config: EngineConfig, facts: dict[str, str], cache: KVCache, kv: dict[str, GroupMemory]
) -> PrefixStore | None:
    options = config.kv_transfer_config.prefix_store
    if options is None:
        return None
    # Pages are stored byte for byte.
    sizes = {name: pool.page_size for name, pool in cache.pools.items()}
    model = json.dumps({**facts, "block_size": sizes, "layout": PAGE_LAYOUT}, sort_keys=True)
    pages = {name: memory.pages for name, memory in kv.items()}
    try:
        store = FileStore(options.path, options.max_bytes)
    except ConfigError as error:
        raise ConfigError("kv_transfer_config.prefix_store", error.message) from None
    return PrefixStore(store, model, cache.pools, pages, writes=config.role != "decode")

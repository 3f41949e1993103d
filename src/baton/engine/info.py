from __future__ import annotations

import json
from pathlib import Path

from baton.engine.config import EngineConfig
from baton.engine.loading.checkpoints import Loaded
from baton.engine.memory.pool_size import PoolSize
from baton.handoff.protocol.frames import PROTOCOL_VERSION
from baton.kv.cache import KVCache
from baton.kv.moved_prefix import prefix_multiple
from baton.kvevents.publisher import EventPublisher
from baton.transports.registry import transport_name
from baton.wire import EngineInfo


def engine_info(
    config: EngineConfig,
    loaded: Loaded,
    size: PoolSize,
    facts: dict[str, str],
    incarnation: str,
    control_addresses: list[str],
    cache: KVCache,
    events: EventPublisher | None = None,
) -> EngineInfo:
    """The engine's description for routers. `control_addresses`: empty without handoffs."""
    spec = config.speculative_config
    moves_all = spec is None or spec.draft_kv == "require"
    kinds = {rules.kind for rules in cache.rules.values()}
    # A state is handed over at a prompt's end, where there is no checkpoint; those at ends of answers are only in KV
    # events.
    refound = moves_all and "state" not in kinds
    step = cache.checkpoint_interval if "state" in kinds else 1
    return EngineInfo(
        engine_id=config.engine_id,
        incarnation=incarnation,
        role=config.role,
        model=config.served_model_name or Path(config.model).name,
        model_path=str(Path(config.model).resolve()),
        max_model_len=size.max_model_len,
        kv_tokens=size.num_tokens,
        prefix_step=step if config.enable_prefix_caching and (refound or config.role != "decode") else 0,
        prefix_multiple=prefix_multiple(cache),
        max_num_seqs=config.max_num_seqs,
        vocab_size=loaded.model.vocab_size,
        eos_token_ids=list(loaded.tokenizer.eos_token_ids),
        control_addresses=control_addresses,
        fingerprint=json.dumps(facts, sort_keys=True),
        num_speculative_tokens=config.num_drafts,
        batch_invariant=config.batch_invariant,
        default_seed=config.seed,
        sampling_defaults=config.sampling_defaults(),
        data_parallel_rank=config.data_parallel_rank if config.data_parallel_size > 1 else None,
        token_api=config.role != "both" or config.token_api,
        kv_transport=transport_name(config.kv_transfer_config.kv_transport) if control_addresses else "",
        protocol=PROTOCOL_VERSION,
        kv_events_port=0 if events is None else events.port,
        kv_events_replay_port=0 if events is None else events.replay_port,
    )

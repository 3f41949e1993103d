"""Lets an engine choose k, if set."""

from __future__ import annotations

import time

from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.speculation.adaptive import AdaptiveDrafts
from baton.engine.speculation.deferred import MOST_STEPS, DeferredRows


def enable_adaptive_drafts(config: EngineConfig, core: EngineCore, max_model_len: int) -> None:
    spec = config.speculative_config
    if spec is None or spec.num_speculative_tokens != "auto":
        return
    # Thread time excludes other processes; this thread takes part in all of torch's work.
    timer = time.thread_time if config.device == "cpu" and config.num_ranks == 1 else time.monotonic
    core.steps.deferred = deferred = _deferred(core)
    core.steps.adaptive = adaptive = AdaptiveDrafts(spec.max_drafts, timer, MOST_STEPS if deferred else 1)
    tables = core.cache.spare() if config.role != "prefill" else None
    if tables is None:
        return
    try:
        limits = config.max_num_seqs, config.max_num_batched_tokens, max_model_len
        adaptive.costs.measure(core.executor, tables.tables, limits, timer)
    finally:
        core.cache.release(tables)


def _deferred(core: EngineCore) -> DeferredRows | None:
    """For drafters whose entries depend on tokens only, or on one row's features and the next token."""
    modules = {rules.module for rules in core.cache.rules.values()}
    if modules not in ({0, 1}, {0, None}) or core.executor.spec.draft_state_groups:
        return None
    return DeferredRows(needs_features=modules == {0, 1})

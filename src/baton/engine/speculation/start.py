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
    defers = _may_wait(core)
    core.steps.adaptive = adaptive = AdaptiveDrafts(spec.max_drafts, timer, MOST_STEPS if defers else 1)
    core.steps.deferred = DeferredRows() if defers else None
    tables = core.cache.spare() if config.role != "prefill" else None
    if tables is None:
        return
    try:
        limits = config.max_num_seqs, config.max_num_batched_tokens, max_model_len
        adaptive.measure(core.executor, tables.tables, limits)
    finally:
        core.cache.release(tables)


def _may_wait(core: EngineCore) -> bool:
    """Whether drafter rows may wait: each entry depends only on one row's features and the next token."""
    spec, modules = core.executor.spec, {rules.module for rules in core.cache.rules.values()}
    return modules == {0, 1} and not spec.draft_state_groups

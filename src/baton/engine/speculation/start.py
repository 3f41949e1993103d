"""Lets an engine choose k, if set."""

from __future__ import annotations

import time

from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.ranks.lockstep import SingleRank
from baton.engine.speculation.adaptive import AdaptiveDrafts
from baton.engine.speculation.deferred import MOST_STEPS, DeferredRows
from baton.engine.speculation.late_rows import LateRows


def enable_adaptive_drafts(config: EngineConfig, core: EngineCore, max_model_len: int) -> None:
    spec = config.speculative_config
    if spec is None or spec.num_speculative_tokens != "auto":
        return
    # Thread time excludes other processes; this thread takes part in all of torch's work.
    timer = time.thread_time if config.device == "cpu" and config.num_ranks == 1 else time.monotonic
    core.steps.deferred = deferred = _deferred(core)
    if deferred is not None:
        core.late = LateRows(deferred, core.steps)
    steps_per_pass = 1 if deferred is None else 0 if deferred.is_unbounded else MOST_STEPS
    core.steps.adaptive = adaptive = AdaptiveDrafts(spec.max_drafts, timer, steps_per_pass)
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
    rules = core.cache.rules.values()
    modules = {one.module for one in rules}
    if modules not in ({0, 1}, {0, None}) or core.executor.spec.draft_state_groups:
        return None
    # Engines that share experts compute in lockstep.
    bounded = not isinstance(core.peers, SingleRank) or any(one.window and one.module for one in rules)
    return DeferredRows(modules == {0, 1}, MOST_STEPS if bounded else None)

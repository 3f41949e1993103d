"""The engine with the least cost: uncached tokens of the prompt, and work for other requests."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.policies.base import EngineNeeds, Policy, cost
from baton.router.pooled_engine import PooledEngine


class CacheAware(Policy):
    name = "cache_aware"
    uses_prefixes = True

    def _pick(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        if len(among) == 1:
            return among[0]
        return min(among, key=lambda engine: (cost(needs, engine, self._config), engine.order))

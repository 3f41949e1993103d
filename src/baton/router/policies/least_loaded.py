"""The engine with the fewest requests of this router."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.policies.base import EngineNeeds, Policy
from baton.router.pooled_engine import PooledEngine


class LeastLoaded(Policy):
    name = "least_loaded"

    def _pick(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        return min(among, key=lambda e: (e.all_inflight, e.order))

"""Each engine in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.policies.base import EngineNeeds, Policy
from baton.router.pooled_engine import PooledEngine


class RoundRobin(Policy):
    name = "round_robin"

    def _pick(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        return min(among, key=lambda engine: engine.order)

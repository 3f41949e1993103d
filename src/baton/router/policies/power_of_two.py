"""The less loaded of two engines drawn at random (M. Mitzenmacher, The Power of Two Choices, 2001)."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.policies.base import EngineNeeds, Policy, other_load
from baton.router.pooled_engine import PooledEngine


class PowerOfTwo(Policy):
    """Several routers with the same stale loads do not all choose the same engine."""

    name = "power_of_two"

    def _pick(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        two = self._random.sample(list(among), min(2, len(among)))
        return min(two, key=lambda engine: (other_load(needs, engine, self._config), engine.order))

"""The interface of policies, which choose engines."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from baton.router.config.policy_config import PolicyConfig
from baton.router.pooled_engine import PooledEngine
from baton.router.prefixes import PromptBlocks
from baton.wire import Role


class EngineNeeds(msgspec.Struct, frozen=True):
    """What a request needs from an engine of one role. `session`: the conversation id. `decodes`: the engine also
    decodes. `receives`: its KV comes from a prefill engine. `elsewhere`: tokens of the prompt that another engine would
    hand back."""

    prompt: PromptBlocks
    session: str | None = None
    decodes: bool = True
    receives: bool = False
    elsewhere: int = 0

    def uncached(self, engine: PooledEngine) -> int:
        """Prompt tokens that the engine probably lacks."""
        return len(self.prompt.tokens) - engine.known.num_tokens(self.prompt)

    def handed_back(self, engine: PooledEngine, config: PolicyConfig) -> int:
        """How many of these another engine would hand back."""
        moved = self.elsewhere - engine.known.num_tokens(self.prompt)
        return moved if moved >= max(1, config.min_hand_back_length) else 0


def cost(needs: EngineNeeds, engine: PooledEngine, config: PolicyConfig) -> float:
    """The cost of this request on this engine, in prompt tokens."""
    uncached = needs.uncached(engine)
    moved = uncached if needs.receives else needs.handed_back(engine, config)
    return config.moved_weight * moved + config.uncached_weight * (uncached - moved) + other_load(needs, engine, config)


def other_load(needs: EngineNeeds, engine: PooledEngine, config: PolicyConfig) -> float:
    """The cost of the engine's other requests. A prefill engine has only prompts."""
    total = config.queued_weight * engine.all_queued_tokens
    if needs.decodes:
        total += config.leg_weight * engine.all_inflight + config.kv_weight * engine.all_kv_tokens
    return total


class Policy(ABC):
    """Chooses the engine of one role. `uses_prefixes`: needs to know what engines hold."""

    name: ClassVar[str]
    uses_prefixes: ClassVar[bool] = False

    def __init__(self, config: PolicyConfig, source: random.Random) -> None:
        self._config, self._random = config, source
        self._turn = 0

    def choose(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        """Equal engines take turns."""
        chosen = self._pick(needs, among)
        self._turn += 1
        chosen.order = self._turn
        return chosen

    @abstractmethod
    def _pick(self, needs: EngineNeeds, among: Sequence[PooledEngine]) -> PooledEngine:
        """`order` is lower for engines chosen longer ago."""


@dataclass(frozen=True, slots=True)
class Policies:
    prefill: Policy
    decode: Policy
    both: Policy
    config: PolicyConfig

    @property
    def uses_prefixes(self) -> bool:
        return any(policy.uses_prefixes for policy in (self.prefill, self.decode, self.both))

    def of(self, role: Role) -> Policy:
        return self.prefill if role == "prefill" else self.decode if role == "decode" else self.both

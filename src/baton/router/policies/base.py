"""The interface of policies, which choose an engine among those that can take a request."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from baton.errors import ConfigError
from baton.router.pooled_engine import PooledEngine
from baton.router.prefixes import PromptBlocks
from baton.wire import EngineLoad, Role


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of policies: the JSON of `--policy-config`. Weights are in the work of computing one prompt token.

    - `uncached_weight`: per prompt token that an engine would have to compute.
    - `moved_weight`: per prompt token that a decode engine would have to receive.
    - `queued_weight`: per prompt token that waits to be computed there for other requests.
    - `leg_weight`: per request that decodes there. `kv_weight`: per token of their KV.
    - `max_turn_prefill_length`: a decode engine that holds the beginning of a prompt computes up to this many more
      tokens if a prefill engine would have at least `turn_ratio` times as many to compute. 0: never.
    - `hand_back`: a prefill engine gets the KV of a prompt's beginning from the engine that holds it, if that has at
      least `min_hand_back_length` tokens more, and if computing them was not faster before.
    - `overload_num_waiting`, `overload_kv_usage`: an engine that reports at least so many waiting requests, or this
      share of its KV in use, gets no new requests. None: it always does.
    """

    uncached_weight: float = 1.0
    moved_weight: float = 0.25
    queued_weight: float = 1.0
    leg_weight: float = 32.0
    kv_weight: float = 0.0625
    max_turn_prefill_length: int = 256
    turn_ratio: float = 1.5
    hand_back: bool = False
    min_hand_back_length: int = 64
    overload_num_waiting: int | None = None
    overload_kv_usage: float | None = None

    def check(self) -> None:
        """Raise `ConfigError` for a value that is out of range."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < float("inf"):
                raise ConfigError("policy_config", f"{name} must be at least 0, got {value}")

    @property
    def has_veto(self) -> bool:
        return self.overload_num_waiting is not None or self.overload_kv_usage is not None

    def is_overload(self, load: EngineLoad) -> bool:
        """Whether an engine with this load gets no new requests."""
        waiting, usage = self.overload_num_waiting, self.overload_kv_usage
        return (waiting is not None and load.num_waiting >= waiting) or (usage is not None and load.kv_usage >= usage)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of an engine of one role. `session`: the client's name for its conversation. `decodes`:
    whether the engine also decodes; `receives`: whether its KV comes from a prefill engine. `elsewhere`: how many
    tokens of the prompt some engine holds that would hand them back; 0: none.
    """

    prompt: PromptBlocks
    session: str | None = None
    decodes: bool = True
    receives: bool = False
    elsewhere: int = 0

    def uncached(self, engine: PooledEngine) -> int:
        """The prompt tokens whose KV the engine probably lacks."""
        return len(self.prompt.tokens) - engine.known.num_tokens(self.prompt)

    def handed_back(self, engine: PooledEngine, config: PolicyConfig) -> int:
        """How many of these another engine would hand back."""
        moved = self.elsewhere - engine.known.num_tokens(self.prompt)
        return moved if moved >= max(1, config.min_hand_back_length) else 0


def cost(asked: Asked, engine: PooledEngine, config: PolicyConfig) -> float:
    """What it costs to give this request to this engine, in prompt tokens."""
    uncached = asked.uncached(engine)
    moved = uncached if asked.receives else asked.handed_back(engine, config)
    return config.moved_weight * moved + config.uncached_weight * (uncached - moved) + load(asked, engine, config)


def load(asked: Asked, engine: PooledEngine, config: PolicyConfig) -> float:
    """The part of the cost from the engine's other requests. A prefill engine has prompts only."""
    found = config.queued_weight * engine.queued_tokens
    if asked.decodes:
        found += config.leg_weight * engine.num_inflight + config.kv_weight * engine.kv_tokens
    return found


class Policy(ABC):
    """Chooses engines of one role."""

    name: ClassVar[str]
    uses_prefixes: ClassVar[bool] = False

    def __init__(self, config: PolicyConfig, source: random.Random) -> None:
        self._config, self._random = config, source
        self._turn = 0

    def choose(self, asked: Asked, among: Sequence[PooledEngine]) -> PooledEngine:
        """Choose one of at least one engine; equal engines take turns."""
        chosen = self._pick(asked, among)
        self._turn += 1
        chosen.order = self._turn
        return chosen

    @abstractmethod
    def _pick(self, asked: Asked, among: Sequence[PooledEngine]) -> PooledEngine:
        """`order` is lower for an engine that was chosen longer ago."""


@dataclass(frozen=True, slots=True)
class Policies:
    prefill: Policy
    decode: Policy
    both: Policy
    config: PolicyConfig

    @property
    def uses_prefixes(self) -> bool:
        """Whether any of them asks what engines hold."""
        return any(policy.uses_prefixes for policy in (self.prefill, self.decode, self.both))

    def of(self, role: Role) -> Policy:
        return {"prefill": self.prefill, "decode": self.decode, "both": self.both}[role]

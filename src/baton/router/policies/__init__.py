"""The router's policies."""

from __future__ import annotations

import random

from baton.errors import ConfigError
from baton.router.config.policy_config import DEFAULT_POLICY, PolicyConfig, read_config
from baton.router.policies.base import EngineNeeds, Policies, Policy
from baton.router.policies.cache_aware import CacheAware
from baton.router.policies.consistent_hash import ConsistentHash
from baton.router.policies.least_loaded import LeastLoaded
from baton.router.policies.power_of_two import PowerOfTwo
from baton.router.policies.round_robin import RoundRobin

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "EngineNeeds",
    "Policies",
    "Policy",
    "PolicyConfig",
    "create_policies",
    "read_config",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (CacheAware, LeastLoaded, PowerOfTwo, RoundRobin, ConsistentHash)
}


def create_policies(
    policy: str = DEFAULT_POLICY,
    prefill: str | None = None,
    decode: str | None = None,
    config: PolicyConfig | None = None,
    source: random.Random | None = None,
) -> Policies:
    """The policies of all roles; `prefill` and `decode` None: as `policy`. `source`: of randomness.

    Raises `ConfigError`.
    """
    used, source = config or PolicyConfig(), source or random.Random()

    def create(field: str, name: str) -> Policy:
        if name not in POLICIES:
            raise ConfigError(field, f"must be one of {', '.join(POLICIES)}, got {name!r}")
        return POLICIES[name](used, source)

    default = create("policy", policy)
    return Policies(
        create("prefill_policy", policy if prefill is None else prefill),
        create("decode_policy", policy if decode is None else decode),
        default,
        used,
    )

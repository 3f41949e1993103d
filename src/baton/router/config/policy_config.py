"""Settings of the router's policies."""

from __future__ import annotations

import msgspec

from baton.errors import ConfigError
from baton.router.admission.tenants import Tenant
from baton.setting import struct_of
from baton.wire import EngineLoad

DEFAULT_POLICY = "cache_aware"


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `--policy-config`: docs/router.md says what each field does. Weights are in the work of computing one
    prompt token, lengths in tokens; None: no limit. `tenants`: by name; `*`: all others.
    """

    uncached_weight: float = 1.0
    moved_weight: float = 0.25
    queued_weight: float = 1.0
    leg_weight: float = 32.0
    kv_weight: float = 0.0625
    max_turn_prefill_length: int = 256
    turn_ratio: float = 1.5
    hand_back: bool = False
    min_hand_back_length: int = 16
    hand_back_limit_s: float = 2.0
    overload_num_waiting: int | None = None
    overload_kv_usage: float | None = None
    tenants: dict[str, Tenant] = {}

    def check(self) -> None:
        for name, tenant in self.tenants.items():
            tenant.check(name)
        least = {"turn_ratio": 1.0, "overload_num_waiting": 1.0}
        for name in self.__struct_fields__:
            value, bound = getattr(self, name), least.get(name, 0.0)
            if name != "tenants" and value is not None and not bound <= value < float("inf"):
                raise ConfigError("policy_config", f"{name} must be at least {bound:g}, got {value}")
        if self.overload_kv_usage is not None and not 0.0 < self.overload_kv_usage <= 1.0:
            what = f"overload_kv_usage must be a share of the KV, above 0 and at most 1, got {self.overload_kv_usage}"
            raise ConfigError("policy_config", what)

    @property
    def has_veto(self) -> bool:
        return self.overload_num_waiting is not None or self.overload_kv_usage is not None

    def is_overload(self, load: EngineLoad) -> bool:
        waiting, usage = self.overload_num_waiting, self.overload_kv_usage
        return (waiting is not None and load.num_waiting >= waiting) or (usage is not None and load.kv_usage >= usage)


def read_config(text: str | None) -> PolicyConfig:
    """Raises `ConfigError`."""
    config = struct_of("policy_config", text, PolicyConfig)
    config.check()
    return config

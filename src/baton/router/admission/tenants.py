"""Tenants, and the standing of a request among those that wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from baton.errors import ConfigError
from baton.wire import UNHURRIED_S, GenerateRequest

if TYPE_CHECKING:
    from baton.openai.http.caller import Caller

# The entry of `tenants` for all others.
ANY = "*"


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant's share and limits (docs/router.md, "Queues"). `max_running`, `max_queued` None: unlimited.
    `priority`: the best class that it may ask for.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    priority: int = 0

    def check(self, name: str) -> None:
        if not 0.0 < self.weight < math.inf:
            raise ConfigError("policy_config", f"tenants.{name}.weight must be above 0, got {self.weight}")
        for field in ("max_running", "max_queued"):
            value = getattr(self, field)
            if value is not None and value < (field == "max_running"):
                raise ConfigError("policy_config", f"tenants.{name}.{field} is too small: {value}")


_ANYBODY = Tenant()


class Standing(msgspec.Struct, frozen=True):
    """`priority`: lower runs first. `deadline`: when the first token is due. `prompt_tokens`: charged to the tenant
    when the request starts."""

    tenant: str = ""
    priority: int = 0
    deadline: float = math.inf
    prompt_tokens: int = 0


def tenant_of(name: str, tenants: Mapping[str, Tenant]) -> Tenant:
    return tenants.get(name) or tenants.get(ANY) or _ANYBODY


def standing_of(caller: Caller | None, request: GenerateRequest, tenants: Mapping[str, Tenant], now: float) -> Standing:
    """No request gets a better priority than its tenant's."""
    name = "" if caller is None else caller.tenant
    within_s = UNHURRIED_S if request.ttft_slo_s is None else request.ttft_slo_s
    priority = max(request.priority, tenant_of(name, tenants).priority)
    return Standing(name, priority, now + within_s, len(request.prompt_token_ids))

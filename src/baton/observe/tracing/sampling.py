"""Which requests are traced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import ConfigError

_LOW = 2**64 - 1
# OpenTelemetry's samplers: the share (None: the variable's argument), and `follows_client`.
_SAMPLERS: dict[str, tuple[float | None, bool]] = {
    "always_on": (1.0, False),
    "always_off": (0.0, False),
    "traceidratio": (None, False),
    "parentbased_always_on": (1.0, True),
    "parentbased_always_off": (0.0, True),
    "parentbased_traceidratio": (None, True),
}


@dataclass(frozen=True, slots=True)
class TraceSampling:
    """Takes a share of traces by their ids. `follows_client`: a client's `traceparent` decides."""

    ratio: float = 1.0
    follows_client: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise ConfigError("trace_sampling_ratio", f"must be between 0 and 1, got {self.ratio}")

    @classmethod
    def of(cls, ratio: float | None, environment: Mapping[str, str] = os.environ) -> TraceSampling:
        """`ratio` None: by OpenTelemetry's variables. Raises `ConfigError`."""
        if ratio is not None:
            return cls(ratio)
        name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
        if name not in _SAMPLERS:
            raise ConfigError("OTEL_TRACES_SAMPLER", f"must be one of {', '.join(_SAMPLERS)}, got {name!r}")
        share, follows_client = _SAMPLERS[name]
        return cls(_argument(environment) if share is None else share, follows_client)

    def takes(self, trace_id: int, client_samples: bool | None) -> bool:
        """`client_samples` None: the request has no `traceparent`."""
        if client_samples is not None and self.follows_client:
            return client_samples
        return (trace_id & _LOW) < self.ratio * 2**64


def _argument(environment: Mapping[str, str]) -> float:
    text = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError("OTEL_TRACES_SAMPLER_ARG", f"must be between 0 and 1, got {text!r}")
    return ratio

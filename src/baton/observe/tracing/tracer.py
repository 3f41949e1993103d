"""Decides which requests are traced, and holds where their spans go."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.observe.timeline import RequestTimeline
from baton.observe.tracing.otlp import OtlpSink, endpoint_is_set
from baton.observe.tracing.perfetto import PerfettoFile
from baton.observe.tracing.request_trace import RemoteParent, RequestTrace, is_trace_sampled
from baton.observe.tracing.span import SpanSink


@dataclass(frozen=True, slots=True)
class Tracer:
    """Traces requests whose client samples, and of others the share `ratio`."""

    sinks: Sequence[SpanSink]
    ratio: float = 1.0

    def begin(self, timeline: RequestTimeline, traceparent: str | None) -> RequestTrace | None:
        """None if the request is not sampled."""
        parent = None if traceparent is None else RemoteParent.of(traceparent)
        sampled = is_trace_sampled(secrets.randbits(64), self.ratio) if parent is None else parent.sampled
        return RequestTrace.begin(self.sinks, timeline, parent) if sampled else None

    def close(self) -> None:
        """May wait for a collector."""
        for sink in self.sinks:
            sink.close()


def make_tracer(endpoint: str | None, file: str | None, ratio: float) -> Tracer | None:
    """To an OTLP endpoint, or the one of OpenTelemetry's variables, and to a file for Perfetto.

    None if neither is set. Raises `ConfigError`.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError("trace_sampling_ratio", f"must be between 0 and 1, got {ratio}")
    sinks: list[SpanSink] = []
    if endpoint is not None or endpoint_is_set():
        sinks.append(OtlpSink(endpoint))
    if file is not None:
        sinks.append(PerfettoFile(file))
    return Tracer(sinks, ratio) if sinks else None

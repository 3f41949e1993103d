"""Decides which requests are traced, and holds where their spans go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.observe.timeline import RequestTimeline
from baton.observe.tracing.otlp import OtlpSink
from baton.observe.tracing.otlp_settings import OtlpSettings, endpoint_is_set
from baton.observe.tracing.perfetto import PerfettoFile
from baton.observe.tracing.request_trace import RemoteParent, RequestTrace, is_trace_sampled
from baton.observe.tracing.span import SpanSink, new_trace_id


@dataclass(frozen=True, slots=True)
class Tracer:
    """Traces requests whose client samples, and of others the share `ratio`."""

    sinks: Sequence[SpanSink]
    ratio: float = 1.0

    def begin(self, timeline: RequestTimeline, traceparent: str | None) -> RequestTrace | None:
        """None if the request is not sampled, which is decided before any part of a trace is made."""
        if traceparent is not None:
            parent = RemoteParent.of(traceparent)
            return RequestTrace.begin(self.sinks, timeline, parent.trace_id, parent.span_id) if parent.sampled else None
        trace_id = new_trace_id()
        sampled = is_trace_sampled(trace_id, self.ratio)
        return RequestTrace.begin(self.sinks, timeline, trace_id, None) if sampled else None

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
        sinks.append(OtlpSink(OtlpSettings.from_environment(endpoint)))
    if file is not None:
        sinks.append(PerfettoFile(file))
    return Tracer(sinks, ratio) if sinks else None

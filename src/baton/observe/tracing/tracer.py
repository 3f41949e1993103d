"""Decides which requests are traced, and holds the exporters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.observe.timeline import RequestTimeline
from baton.observe.tracing.otlp import OtlpSink
from baton.observe.tracing.otlp_settings import OtlpSettings, endpoint_is_set
from baton.observe.tracing.perfetto import PerfettoFile
from baton.observe.tracing.request_trace import RemoteParent, RequestTrace
from baton.observe.tracing.sampling import TraceSampling
from baton.observe.tracing.span import SpanSink, new_trace_id


@dataclass(frozen=True, slots=True)
class Tracer:
    sinks: Sequence[SpanSink]
    sampling: TraceSampling

    def begin(self, timeline: RequestTimeline, traceparent: str | None) -> RequestTrace | None:
        """None if the request is not sampled, which is decided before any part of a trace is made."""
        if traceparent is not None:
            parent = RemoteParent.of(traceparent)
            trace_id, parent_id, client_samples = parent.trace_id, parent.span_id, parent.sampled
        else:
            trace_id, parent_id, client_samples = new_trace_id(), None, None
        sampled = self.sampling.takes(trace_id, client_samples)
        return RequestTrace.begin(self.sinks, timeline, trace_id, parent_id) if sampled else None

    def close(self) -> None:
        """May wait for a collector."""
        for sink in self.sinks:
            sink.close()


def make_tracer(
    endpoint: str | None, file: str | None, ratio: float | None, number: int | None = None
) -> Tracer | None:
    """Exports to an OTLP endpoint, by default OpenTelemetry's variables', and to a file for Perfetto. `ratio` None: by
    these variables too. `number`: of several processes, each with its own file.

    None if neither is set. Raises `ConfigError`.
    """
    sinks: list[SpanSink] = []
    is_exporting = endpoint is not None or endpoint_is_set()
    if not is_exporting and file is None:
        return None
    sampling = TraceSampling.of(ratio)
    if is_exporting:
        sinks.append(OtlpSink(OtlpSettings.from_environment(endpoint)))
    if file is not None:
        path = Path(file)
        sinks.append(PerfettoFile(str(path if number is None else path.with_stem(f"{path.stem}-{number}"))))
    return Tracer(sinks, sampling)

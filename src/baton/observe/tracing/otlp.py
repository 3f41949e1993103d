"""Spans to an OpenTelemetry collector, through the SDK's batches and its OTLP exporter over HTTP."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from baton import __version__
from baton.errors import ConfigError
from baton.observe.tracing.span import Span

logger = logging.getLogger(__name__)

_KINDS = {"server": "SERVER", "client": "CLIENT", "internal": "INTERNAL"}


def endpoint_is_set(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry's own variables name a collector and do not turn it off."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    off |= environment.get("OTEL_TRACES_EXPORTER", "otlp") not in ("otlp", "")
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return not off and any(environment.get(name) for name in names)


class OtlpSink:
    """Exports spans in batches from a thread of the SDK. If the collector does not answer, spans are dropped.

    Raises `ConfigError` without the optional packages (`pip install 'baton-serve[otel]'`).
    """

    def __init__(self, endpoint: str | None, exporter: Any = None) -> None:
        """`endpoint` None: from OpenTelemetry's own variables. `exporter`: for tests."""
        try:
            trace_api = importlib.import_module("opentelemetry.trace")
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            batches = importlib.import_module("opentelemetry.sdk.trace.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            over_http = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError as error:
            raise ConfigError("otlp_traces_endpoint", f"needs pip install 'baton-serve[otel]': {error}") from None
        self._api, self._sdk = trace_api, sdk
        name = os.environ.get("OTEL_SERVICE_NAME", "baton-router")
        told = {"service.name": name, "service.version": __version__}
        self._resource = resources.Resource.create(told)
        exporter = exporter or (over_http.OTLPSpanExporter(endpoint) if endpoint else over_http.OTLPSpanExporter())
        self._batches = batches.BatchSpanProcessor(exporter)

    def export(self, span: Span) -> None:
        try:
            self._batches.on_end(self._readable(span))
        except Exception:  # a trace must not fail a request
            logger.exception("a span could not be exported")

    def close(self) -> None:
        self._batches.shutdown()

    def _context(self, span: Span, span_id: int) -> Any:
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=flags)

    def _readable(self, span: Span) -> Any:
        status = self._api.Status(self._api.StatusCode.ERROR, span.error) if span.error else self._api.Status()
        return self._sdk.ReadableSpan(
            name=span.name,
            context=self._context(span, span.span_id),
            parent=None if span.parent_id is None else self._context(span, span.parent_id),
            resource=self._resource,
            attributes=span.attributes,
            events=[self._sdk.Event(event.name, event.attributes, event.at) for event in span.events],
            links=[self._api.Link(self._context(span, link)) for link in span.links],
            kind=self._api.SpanKind[_KINDS[span.kind]],
            status=status,
            start_time=span.start,
            end_time=span.end,
        )

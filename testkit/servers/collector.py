"""An OpenTelemetry collector that parses what an OTLP exporter sends, with opentelemetry-proto."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web


class Collector:
    """Keeps all spans and the attributes of their resources."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    async def take(self, request: web.Request) -> web.StreamResponse:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = await request.read()
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(body=b"", content_type="application/x-protobuf")

    @contextlib.asynccontextmanager
    async def run(self, port: int = 0) -> AsyncIterator[str]:
        """Its endpoint; 0: at a free port."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/traces", self.take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
        finally:
            await runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    """Attributes of a parsed span or resource."""

    def value(told: Any) -> Any:
        kind = told.WhichOneof("value")
        return [value(one) for one in told.array_value.values] if kind == "array_value" else getattr(told, kind)

    return {pair.key: value(pair.value) for pair in span.attributes}

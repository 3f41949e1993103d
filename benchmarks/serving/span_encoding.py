"""`python -m benchmarks.serving.span_encoding`: what it costs to encode a request's spans, here and by OpenTelemetry.

CPU time of one thread for the eight spans of a handed-off request: by Baton's encoder; and by OpenTelemetry's, given
its own `ReadableSpan`s, made from Baton's spans as late as possible (batches of 512, as in a thread that exports). That
is the least that its SDK and exporter can cost. Needs `pip install opentelemetry-exporter-otlp-proto-http`, which
brings the SDK; Baton does not.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from baton.observe.tracing.otlp_encoding import encode_request, encode_resource
from baton.observe.tracing.span import Span, SpanEvent, Value, new_trace_id

_BATCH = 512
_EVENTS = ("announced", "admitted", "registered", "first bytes", "last bytes", "committed")
_LATENCIES = ("e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")


def spans_of(number: int) -> list[Span]:
    """Those of `docs/traces.md` for a request of two legs."""
    at, trace = 10**9 * number, new_trace_id()
    root = Span("llm_request", trace, at, None, "server", end=at + 10**8)
    latencies: dict[str, Value] = {f"gen_ai.latency.{name}": 1e-5 * number for name in _LATENCIES}
    root.attributes = {
        "gen_ai.request.id": f"cmpl-{number}",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 256 + number % 7,
        "gen_ai.usage.completion_tokens": 64,
        "baton.route": "handed_off",
        "baton.engines": ("prefill-0", "decode-0"),
        "baton.num_attempts": 1,
        **latencies,
    }
    found = [root]

    def child(name: str, parent: Span, **attributes: Value) -> Span:
        span = Span(f"baton.{name}", trace, at, parent.span_id, end=at + 10**7)
        span.attributes = {f"baton.{key}": value for key, value in attributes.items()}
        found.append(span)
        return span

    legs = [child(f"{role}_leg", root, engine=f"{role}-0", attempt=1) for role in ("prefill", "decode")]
    child("queue", legs[0])
    child("prefill", legs[0], num_chunks=1)
    handoff = child("handoff", legs[1], mode="push", bytes=4096 * number, runs=3, hidden_share=0.5, integrity="off")
    handoff.events = [SpanEvent(name, at + i) for i, name in enumerate(_EVENTS)]
    handoff.links = [leg.span_id for leg in legs]
    child("first_verification", legs[1], drafts=3, accepted=number % 4)
    child("decode", legs[1])
    return found


def by_opentelemetry() -> Callable[[Sequence[Span]], bytes]:
    """Raises `ImportError` without its packages."""
    sdk, api = importlib.import_module("opentelemetry.sdk.trace"), importlib.import_module("opentelemetry.trace")
    encoder = importlib.import_module("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    resource = importlib.import_module("opentelemetry.sdk.resources").Resource({"service.name": "baton-router"})
    scope = importlib.import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope("baton")
    flags, status = api.TraceFlags(1), api.Status()
    kinds = {name: api.SpanKind[name.upper()] for name in ("server", "client", "internal")}

    def readable(span: Span) -> Any:
        def context(span_id: int) -> Any:
            return api.SpanContext(span.trace_id, span_id, False, flags)

        return sdk.ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=None if span.parent_id is None else context(span.parent_id),
            resource=resource,
            attributes=span.attributes,
            events=[sdk.Event(event.name, None, event.at) for event in span.events],
            links=[api.Link(context(link)) for link in span.links],
            kind=kinds[span.kind],
            status=status,
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=scope,
        )

    def encode(spans: Sequence[Span]) -> bytes:
        body: bytes = encoder.encode_spans([readable(span) for span in spans]).SerializeToString()
        return body

    return encode


def cost_us(encode: Callable[[Sequence[Span]], bytes], requests: Sequence[list[Span]]) -> float:
    """CPU microseconds per request."""
    spans = list(itertools.chain.from_iterable(requests))
    before = time.process_time()
    for begin in range(0, len(spans), _BATCH):
        encode(spans[begin : begin + _BATCH])
    return (time.process_time() - before) / len(requests) * 1e6


def main(
    requests: Annotated[int, typer.Option(help="In one round.")] = 500,
    rounds: Annotated[int, typer.Option(help="Of each encoder, in turns.")] = 7,
) -> None:
    """Print microseconds of CPU per request."""
    resource = encode_resource({"service.name": "baton-router"})
    try:
        encoders = {"Baton": lambda spans: encode_request(spans, resource), "OpenTelemetry": by_opentelemetry()}
    except ImportError as error:
        raise SystemExit(f"{error}: pip install opentelemetry-exporter-otlp-proto-http") from None
    taken: dict[str, list[float]] = {name: [] for name in encoders}
    for at in range(rounds):
        made = [spans_of(at * requests + number) for number in range(requests)]
        for name, encode in encoders.items():
            taken[name].append(cost_us(encode, made))
    for name, values in taken.items():
        print(f"{name}: {statistics.median(values):.0f} us per request ({min(values):.0f} to {max(values):.0f})")


if __name__ == "__main__":
    typer.run(main)

"""What a collector reads, over which settings it comes, and what happens if it does not answer."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from baton.errors import ConfigError
from baton.observe.tracing.otlp import OtlpSink
from baton.observe.tracing.otlp_encoding import encode_request, encode_resource
from baton.observe.tracing.otlp_settings import OtlpSettings, endpoint_is_set
from baton.observe.tracing.sampling import TraceSampling
from baton.observe.tracing.span import Span, SpanEvent
from testkit.servers.collector import attributes

TLS = Path(__file__).parents[1] / "openai" / "http" / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")  # self-signed, only for tests
IDS, TIMES = st.integers(1, 2**64 - 1), st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
VALUES = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(TEXTS, max_size=3).map(tuple),
)
EVENTS = st.builds(SpanEvent, TEXTS, TIMES)
SPANS = st.builds(
    Span,
    name=TEXTS,
    trace_id=st.integers(1, 2**128 - 1),
    start=TIMES,
    end=TIMES,
    parent_id=st.none() | IDS,
    kind=st.sampled_from(["server", "client", "internal"]),
    error=TEXTS,
    attributes=st.dictionaries(TEXTS, VALUES, max_size=4),
    events=st.lists(EVENTS, max_size=3),
    links=st.lists(IDS, max_size=3),
    span_id=IDS,
)


def parsed(body: bytes) -> tuple[dict[str, Any], list[Any]]:
    """The resource's attributes and the spans."""
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (scope,) = resource.scope_spans
    return attributes(resource.resource), list(scope.spans)


@settings(max_examples=20, deadline=None)
@given(st.lists(SPANS, max_size=4), st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_opentelemetry_reads_what_was_encoded(spans: list[Span], resource: dict[str, str]) -> None:
    told, read = parsed(encode_request(spans, encode_resource(resource)))
    assert told == resource
    for span, found in zip(spans, read, strict=True):
        trace_id = span.trace_id.to_bytes(16, "big")
        parent = b"" if span.parent_id is None else span.parent_id.to_bytes(8, "big")
        assert (found.trace_id, found.span_id) == (trace_id, span.span_id.to_bytes(8, "big"))
        assert (found.parent_span_id, found.name) == (parent, span.name)
        assert (found.start_time_unix_nano, found.end_time_unix_nano) == (span.start, span.end)
        assert found.SpanKind.Name(found.kind) == f"SPAN_KIND_{span.kind.upper()}"
        wanted = {name: list(value) if isinstance(value, tuple) else value for name, value in span.attributes.items()}
        assert [(name, type(value), value) for name, value in attributes(found).items()] == [
            (name, type(value), value) for name, value in wanted.items()
        ]
        assert [(event.name, event.time_unix_nano) for event in found.events] == [(e.name, e.at) for e in span.events]
        assert [link.span_id for link in found.links] == [link.to_bytes(8, "big") for link in span.links]
        assert {link.trace_id for link in found.links} <= {trace_id}
        assert (found.status.code, found.status.message) == ((2, span.error) if span.error else (0, ""))


def test_texts_that_are_no_utf_8_are_encoded_too() -> None:
    span = Span("a", 1, 0, error="\ud800", attributes={"b": "\udfff"})
    _, (found,) = parsed(encode_request([span], b""))
    assert (found.status.message, attributes(found)) == ("?", {"b": "?"})


class _Handler(http.server.BaseHTTPRequestHandler):
    """Ends a connection after each answer without a word, as a collector may between two batches."""

    server: AnsweringCollector
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heads.append({name.lower(): value for name, value in self.headers.items()})
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            self.server.spans += parsed(zlib.decompress(body, 47) if "Content-Encoding" in self.headers else body)[1]
        self.send_response(status)
        self.send_header("Retry-After", self.server.retry_after)
        if not self.server.endless:
            self.send_header("Content-Length", "0")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while self.server.endless and self.server.num_written < 1 << 28:
                self.server.num_written += self.wfile.write(bytes(1 << 16))

    def log_message(self, *said: object) -> None:
        pass


class AnsweringCollector(http.server.ThreadingHTTPServer):
    """`statuses`: of the first answers; the later ones are 200. `heads`: headers of all requests, in lower case."""

    def __init__(self, tls: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "https" if tls else "http"
        if tls:  # with a client's certificate
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=CERT)
            context.load_cert_chain(CERT, KEY)
            context.verify_mode = ssl.CERT_REQUIRED
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.statuses: list[int] = []
        self.heads: list[dict[str, str]] = []
        self.spans: list[Any] = []
        self.retry_after, self.endless, self.num_written = "0", False, 0

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}/v1/traces"

    def handle_error(self, *said: object) -> None:
        """Of a connection whose handshake failed."""


@pytest.fixture
def collector() -> Iterator[AnsweringCollector]:
    with AnsweringCollector() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def sent(collector: AnsweringCollector, spans: int, **environment: str) -> OtlpSink:
    """A sink that has been closed after so many spans."""
    sink = OtlpSink(OtlpSettings.from_environment(collector.endpoint, environment))
    for number in range(spans):
        sink.export(Span(f"span {number}", 1, 0))
    sink.close()
    return sink


def test_spans_come_in_batches_and_in_order(collector: AnsweringCollector) -> None:
    sent(collector, 25, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10", OTEL_EXPORTER_OTLP_HEADERS="x-key=a%20b,nothing")
    assert [span.name for span in collector.spans] == [f"span {number}" for number in range(25)]
    assert len(collector.heads) >= 3
    assert {head["x-key"] for head in collector.heads} == {"a b"}
    assert {head["content-type"] for head in collector.heads} == {"application/x-protobuf"}


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_batches_are_compressed_if_told(collector: AnsweringCollector, compression: str) -> None:
    sent(collector, 1, OTEL_EXPORTER_OTLP_COMPRESSION="gzip", OTEL_EXPORTER_OTLP_TRACES_COMPRESSION=compression)
    assert [head["content-encoding"] for head in collector.heads] == [compression]
    assert len(collector.spans) == 1


@pytest.mark.parametrize(("status", "tries"), [(503, 2), (429, 2), (400, 1)])
def test_a_temporary_refusal_is_retried(
    collector: AnsweringCollector, status: int, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    collector.statuses = [status]
    sent(collector, 1)
    assert len(collector.heads) == tries
    assert len(collector.spans) == tries - 1
    assert [record.message for record in caplog.records] == (
        [] if tries == 2 else [f"1 spans were dropped: {collector.endpoint}: HTTP 400"]
    )


def test_an_endless_answer_is_not_read(collector: AnsweringCollector) -> None:
    collector.statuses, collector.endless = [503], True
    sent(collector, 1)
    assert len(collector.heads) == 2
    assert collector.num_written < 1 << 25


def test_a_superscript_is_no_number_of_seconds(collector: AnsweringCollector, caplog: pytest.LogCaptureFixture) -> None:
    collector.statuses, collector.retry_after = [503], "\u00b2"
    sent(collector, 1)
    assert (len(collector.heads), len(collector.spans), caplog.records) == (2, 1, [])


def test_a_full_queue_drops_spans_and_says_so(collector: AnsweringCollector, caplog: pytest.LogCaptureFixture) -> None:
    sent(collector, 12, OTEL_BSP_MAX_QUEUE_SIZE="5")
    assert [span.name for span in collector.spans] == [f"span {number}" for number in range(5)]
    assert [record.message for record in caplog.records] == [
        f"7 spans were dropped: the queue for {collector.endpoint} was full"
    ]


def test_settings_are_opentelemetrys_variables() -> None:
    every = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://host:4318/",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2.5",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": "ca",
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": "own",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": "key",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=a%2Cb,service.name=other",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    found = OtlpSettings.from_environment(None, every)
    assert (found.endpoint, found.timeout_s, found.delay_s) == ("https://host:4318/v1/traces", 2.5, 0.1)
    assert (found.certificate, found.client_certificate, found.client_key) == ("ca", "own", "key")
    assert found.resource["deployment.environment"] == "a,b"
    assert found.resource["service.name"] == "other"
    named = OtlpSettings.from_environment(None, {**every, "OTEL_SERVICE_NAME": "mine"})
    assert named.resource["service.name"] == "mine"
    own = OtlpSettings.from_environment(None, {**every, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://own"})
    assert own.endpoint == "http://own"


@pytest.mark.parametrize(
    ("endpoint", "environment", "why"),
    [
        ("host:4318", {}, "otlp_traces_endpoint: must be like http://HOST:4318/v1/traces"),
        ("http://a", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "must be http/protobuf"),
        ("http://a", {"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "zstd"}, "must be one of none, gzip, deflate"),
        ("http://a", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "TRACES_PROTOCOL: must be http/protobuf"),
        ("http://a", {"OTEL_EXPORTER_OTLP_TIMEOUT": "-1"}, "OTEL_EXPORTER_OTLP_TIMEOUT: must be a positive number"),
        ("http://a", {"OTEL_PROPAGATORS": "b3,jaeger"}, "OTEL_PROPAGATORS: must contain tracecontext"),
        ("http://a", {"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE: must be a positive number"),
        (
            "http://a",
            {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "0.5"},
            "BATCH_SIZE: must be .* of at least 1, got '0.5'",
        ),
        ("http://a", {"OTEL_EXPORTER_OTLP_HEADERS": "a=b%0D%0Ac: d"}, "OTLP_HEADERS: has the header 'a', which HTTP"),
        ("http://a", {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a b=c"}, "TRACES_HEADERS: has the header 'a b', which"),
        ("http://a", {"OTEL_EXPORTER_OTLP_HEADERS": "a=%E2%82%AC"}, "OTLP_HEADERS: has the header 'a', which HTTP"),
        ("http://a:99999", {}, "otlp_traces_endpoint: must be like http://HOST:4318/v1/traces"),
        ("http://[::1", {}, "otlp_traces_endpoint: must be like http://HOST:4318/v1/traces"),
        ("http://a/b c", {}, "otlp_traces_endpoint: must be like http://HOST:4318/v1/traces"),
        ("http://me:secret@a", {}, "otlp_traces_endpoint: must not contain a user: put it into"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://a:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT: must be like http"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "a"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: must be like http"),
    ],
)
def test_settings_that_cannot_be_used_are_named(endpoint: str | None, environment: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        OtlpSettings.from_environment(endpoint, environment)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_collectors_certificate_is_checked(trusted: bool, caplog: pytest.LogCaptureFixture) -> None:
    with AnsweringCollector(tls=True) as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        files = {"CERTIFICATE": CERT} if trusted else {}
        files |= {"CLIENT_CERTIFICATE": CERT, "CLIENT_KEY": KEY, "TIMEOUT": "60"}
        sent(collector, 1, **{f"OTEL_EXPORTER_OTLP_{name}": value for name, value in files.items()})
        collector.shutdown()
        thread.join()
    assert len(collector.spans) == int(trusted)
    assert ["CERTIFICATE_VERIFY_FAILED" in record.message for record in caplog.records] == [True] * (not trusted)


def test_a_collector_that_does_not_answer_in_time_gets_no_more_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sink = OtlpSink(OtlpSettings.from_environment(endpoint, {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "0.05"}))
        sink.export(Span("a", 1, 0))
        sink.close()
    assert [record.message for record in caplog.records] == [f"1 spans were dropped: {endpoint}: timed out"]


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    variables = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="certificates cannot be read"):
        OtlpSink(OtlpSettings.from_environment("https://a", variables))


def test_an_endpoint_is_set_by_a_variable_that_is_not_turned_off() -> None:
    assert not endpoint_is_set({})
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}
    assert endpoint_is_set(endpoint)
    assert not endpoint_is_set({**endpoint, "OTEL_SDK_DISABLED": "true"})
    assert not endpoint_is_set({**endpoint, "OTEL_TRACES_EXPORTER": "none"})
    # OpenTelemetry's own default endpoint.
    assert endpoint_is_set({"OTEL_TRACES_EXPORTER": "otlp"})
    assert OtlpSettings.from_environment(None, {}).endpoint == "http://localhost:4318/v1/traces"
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER: must be otlp or none for the router, got 'zipkin'"):
        endpoint_is_set({**endpoint, "OTEL_TRACES_EXPORTER": "zipkin"})


@pytest.mark.parametrize(
    ("sampler", "argument", "wanted"),
    [
        ("", "", TraceSampling(1.0, True)),
        ("always_on", "0.5", TraceSampling(1.0, False)),
        ("always_off", "", TraceSampling(0.0, False)),
        ("traceidratio", "0.25", TraceSampling(0.25, False)),
        ("traceidratio", "", TraceSampling(1.0, False)),
        ("parentbased_always_on", "", TraceSampling(1.0, True)),
        ("parentbased_always_off", "", TraceSampling(0.0, True)),
        ("parentbased_traceidratio", "0.25", TraceSampling(0.25, True)),
    ],
)
def test_samplers_are_opentelemetrys(sampler: str, argument: str, wanted: TraceSampling) -> None:
    environment = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert TraceSampling.of(None, environment) == wanted
    assert TraceSampling.of(0.75, environment) == TraceSampling(0.75, True), "the flag comes first"


@pytest.mark.parametrize(
    ("sampler", "argument", "why"),
    [
        ("xray", "", "_SAMPLER: must be one of always_on"),
        ("traceidratio", "2", "_SAMPLER_ARG: must be between 0 and 1, got '2'"),
        ("traceidratio", "half", "_SAMPLER_ARG: must be between 0 and 1"),
    ],
)
def test_samplers_that_cannot_be_used_are_named(sampler: str, argument: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"OTEL_TRACES{why}"):
        TraceSampling.of(None, {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument})


def test_a_share_of_traces_is_taken_by_id() -> None:
    half, always_off = TraceSampling(0.5), TraceSampling(0.0, follows_client=False)
    assert half.takes(2**127 + 2**63 - 1, None)
    assert not half.takes(2**63, None)
    assert half.takes(2**63, True), "the client decides"
    assert not half.takes(1, False)
    assert not always_off.takes(1, True)

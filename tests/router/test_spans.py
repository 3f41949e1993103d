"""Spans of requests, as an OpenTelemetry collector reads them, and as a timeline for Perfetto."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from baton.errors import ConfigError
from baton.observe.tracing.tracer import make_tracer
from baton.wire import GenerateRequest, LegTimings, TokenChunk
from testkit.servers.collector import Collector, attributes
from testkit.servers.fake_serving import FakeEngine, served
from testkit.servers.fleets import Cluster, complete
from tests.router.test_acceptance import named

ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{ID}-{PARENT}-01"}
EVENTS = ("announced", "admitted", "registered", "first_bytes", "last_bytes", "committed")
COMMON = {
    "gen_ai.request.id",
    "gen_ai.request.max_tokens",
    "gen_ai.request.n",
    "gen_ai.request.temperature",
    "gen_ai.request.top_p",
    "gen_ai.response.model",
    "gen_ai.usage.prompt_tokens",
    "gen_ai.usage.completion_tokens",
    "gen_ai.latency.e2e",
    "baton.route",
    "baton.engines",
    "baton.num_attempts",
}
IN_MODEL = ("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference")
LEG = {"baton.engine", "server.address", "baton.attempt"}
# Every span that docs/traces.md names, with its attributes; `?`: not in every span.
DOCUMENTED: dict[str, set[str]] = {
    "llm_request": COMMON
    | {f"gen_ai.latency.{name}" for name in ("time_to_first_token", "time_in_queue", *IN_MODEL)}
    | {"gen_ai.response.finish_reasons"},
    "baton.prefill_leg": LEG,
    "baton.decode_leg": LEG,
    "baton.local_leg": LEG,
    "baton.queue": set(),
    "baton.prefill": {"baton.num_chunks"},
    "baton.prefill_chunk": {"baton.num_tokens"},
    "baton.decode": set(),
    "baton.handoff": {
        "baton.handoff.mode",
        "baton.handoff.estimated",
        "baton.handoff.bytes",
        "baton.handoff.runs",
        "baton.handoff.hidden_share",
        "baton.handoff.integrity",
    },
    "baton.first_verification": {"baton.drafts", "baton.accepted"},
    "baton.recovery": {"baton.recovery.rung", "baton.recovery.cause", "baton.recovery.known_tokens"},
}


class TimedEngine(FakeEngine):
    """A fake engine that tells its times, if asked."""

    def generate(self, request: GenerateRequest) -> Any:
        return self._timed(super().generate(request), request)

    async def _timed(self, chunks: Any, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        told = LegTimings(started=0.0, sampled=1e-4, chunks=[(0.0, 8), (5e-5, 5)])
        if request.handoff is not None and request.handoff.role == "decode":
            times = {name: number * 1e-6 for number, name in enumerate(EVENTS)}
            told = msgspec.structs.replace(LegTimings(num_bytes=4096, num_runs=2, integrity="sampled"), **times)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if request.timings and chunk.position == 0:
                    chunk = msgspec.structs.replace(chunk, timings=told)
                yield chunk


def cluster_of(directory: Path, **numbers: int) -> Cluster:
    cluster = named(Cluster(directory, **numbers))
    for engine in (*cluster.prefills, *cluster.decodes):
        engine.__class__ = TimedEngine
    return cluster


@pytest.fixture
def collector() -> Collector:
    return Collector()


async def test_a_request_with_failover_is_one_trace(directory: Path, collector: Collector) -> None:
    """A client's trace goes on through the router, both legs, the handoff and the recovery."""
    cluster = cluster_of(directory, num_prefill=1, num_decode=2)
    cluster.decodes[0].fail = "dies"
    async with collector.run() as endpoint:
        async with cluster.run(otlp_traces_endpoint=endpoint, max_local_prefill_length=4) as (url, session):
            asked = {"prompt": "a long prompt", "max_tokens": 30, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=asked, headers=TRACEPARENT) as response:
                assert response.status == 200
            assert (await complete(session, url))[0] == 200  # a short prompt, in a trace of its own
        spans = collector.spans
    assert {span.name for span in spans} == set(DOCUMENTED)
    mine = [span for span in spans if span.trace_id.hex() == ID]
    (root,) = [span for span in mine if span.name == "llm_request"]
    assert root.parent_span_id.hex() == PARENT
    by_id = {span.span_id: span for span in mine}
    assert len(by_id) == len(mine), "span ids differ"
    for span in mine:
        if span is not root:
            assert span.parent_span_id in by_id, span.name
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    for name, wanted in DOCUMENTED.items():
        found: set[str] = set()
        for span in spans:
            found |= set(attributes(span)) if span.name == name else set()
        assert found == wanted, name
    handoff = next(span for span in mine if span.name == "baton.handoff")
    assert [event.name for event in handoff.events] == [name.replace("_", " ") for name in EVENTS]
    times = [event.time_unix_nano for event in handoff.events]
    assert times == sorted(times)
    chunks = [span for span in mine if span.name == "baton.prefill_chunk"]
    assert [attributes(span)["baton.num_tokens"] for span in chunks] == [8, 5]
    assert {by_id[span.parent_span_id].name for span in chunks} == {"baton.prefill"}
    assert chunks[0].end_time_unix_nano == chunks[1].start_time_unix_nano
    assert [by_id[link.span_id].name for link in handoff.links] == ["baton.prefill_leg", "baton.decode_leg"]
    assert attributes(handoff)["baton.handoff.bytes"] == 4096
    (recovery,) = [span for span in mine if span.name == "baton.recovery"]
    assert attributes(recovery)["baton.recovery.rung"] == "full"
    failed = [span.name for span in mine if span.status.code == 2]
    assert failed == ["baton.decode", "baton.decode_leg"], "a failure marks only the phase that was active"
    told = attributes(root)
    assert told["baton.num_attempts"] == 2
    prefill, decode, inference = (told[f"gen_ai.latency.{name}"] for name in IN_MODEL)
    assert inference == pytest.approx(prefill + decode)
    assert 0.0 < prefill <= told["gen_ai.latency.time_to_first_token"]
    assert inference <= told["gen_ai.latency.e2e"]
    assert {told["service.name"] for told in collector.resources} == {"baton-router"}


async def test_engines_get_their_legs_span_as_parent(directory: Path, collector: Collector) -> None:
    cluster = cluster_of(directory, num_prefill=1, num_decode=1)
    seen: set[str] = set()

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        seen.update(request.headers.getall("traceparent", []))
        answer: web.StreamResponse = await handler(request)
        return answer

    made = cluster.app
    cluster.app = lambda engine: _with(made(engine), note)  # type: ignore[method-assign]
    async with collector.run() as endpoint, cluster.run(otlp_traces_endpoint=endpoint) as (url, session):
        assert (await complete(session, url))[0] == 200
    legs = {f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in collector.spans if "_leg" in span.name}
    assert seen == legs
    assert len(legs) == 2


def _with(app: web.Application, middleware: Any) -> web.Application:
    app.middlewares.append(middleware)
    return app


async def test_the_same_as_a_timeline_in_a_file(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    cluster = cluster_of(directory, num_prefill=1, num_decode=1)
    async with cluster.run(trace=str(file)) as (url, session):
        assert (await complete(session, url, n=2))[0] == 200
        json.loads(file.read_text() + "]")  # readable while the router runs
    events = json.loads(file.read_text())
    processes = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert set(processes) == {"router", "prefill-0", "decode-0"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["name"] for span in spans if span["pid"] == processes["decode-0"]} == {
        "baton.handoff",
        "baton.first_verification",
        "baton.decode",
    }
    assert len({span["tid"] for span in spans}) == 2, "one line per choice"
    assert all(span["dur"] >= 0 for span in spans)


async def test_an_unsampled_request_leaves_no_span_and_asks_engines_for_none(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    cluster = cluster_of(directory, num_prefill=1, num_decode=1)
    async with cluster.run(trace=str(file), trace_sampling_ratio=0.0) as (url, session):
        assert (await complete(session, url))[0] == 200
        unsampled = {"traceparent": f"00-{ID}-{PARENT}-00"}
        async with session.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=unsampled) as response:
            assert response.status == 200
    assert json.loads(file.read_text()) == []
    assert not any(request.timings for engine in cluster.decodes for request in engine.requests)


@contextlib.contextmanager
def calls_of_tracing() -> Iterator[set[str]]:
    """The functions of `baton.observe.tracing` that this thread calls, the methods of its data classes included."""
    called: set[str] = set()

    def note(frame: types.FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and frame.f_globals.get("__name__", "").startswith("baton.observe.tracing."):
            called.add(code.co_name)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("traced", [False, True])
async def test_without_traces_no_object_of_them_is_made(directory: Path, tmp_path: Path, traced: bool) -> None:
    cluster = cluster_of(directory, num_prefill=1, num_decode=2)
    cluster.decodes[0].fail = "dies"
    settings = {"trace": str(tmp_path / "trace.json")} if traced else {}
    async with cluster.run(**settings) as (url, session):
        with calls_of_tracing() as called:
            asked = {"prompt": "a", "max_tokens": 30}
            async with session.post(f"{url}/v1/completions", json=asked, headers=TRACEPARENT) as response:
                assert response.status == 200
    assert ("__init__" in called and "on_recovery" in called) if traced else called == set()


async def test_a_dead_collector_fails_no_request(directory: Path, collector: Collector) -> None:
    async with served(web.Application()) as nobody:
        cluster = cluster_of(directory, num_prefill=1, num_decode=1)
        async with cluster.run(otlp_traces_endpoint=f"{nobody}/v1/traces") as (url, session):
            assert (await complete(session, url))[0] == 200


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variables")
def test_no_tracer_without_a_place_for_spans(tmp_path: Path) -> None:
    assert make_tracer(None, None, 1.0) is None
    file = str(tmp_path / "file")
    with pytest.raises(ConfigError, match="trace_sampling_ratio"):
        make_tracer(None, file, 2.0)
    with pytest.raises(ConfigError, match="trace: cannot be written"):
        make_tracer(None, str(tmp_path / "none" / "file"), 1.0)


@pytest.mark.usefixtures("no_variables")
def test_each_of_several_processes_has_a_file_of_its_own(tmp_path: Path) -> None:
    tracers = [make_tracer(None, str(tmp_path / "trace.json"), None, number) for number in range(2)]
    for tracer in filter(None, tracers):
        tracer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace-0.json", "trace-1.json"]


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(("sampler", "traced"), [("always_on", True), ("parentbased_always_on", False)])
async def test_opentelemetrys_sampler_is_asked(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, traced: bool
) -> None:
    """Of a client that does not sample."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    file = tmp_path / "trace.json"
    cluster = cluster_of(directory, num_prefill=1, num_decode=1)
    async with cluster.run(trace=str(file)) as (url, session):
        unsampled = {"traceparent": f"00-{ID}-{PARENT}-00"}
        async with session.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=unsampled) as response:
            assert response.status == 200
    traces = {event["args"]["trace_id"] for event in json.loads(file.read_text()) if event["ph"] == "X"}
    assert traces == ({ID} if traced else set())


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_every_span_is_documented(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
    for attribute in DOCUMENTED[name]:
        assert f"`{attribute}`" in row, attribute

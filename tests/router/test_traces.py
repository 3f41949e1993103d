"""A client's trace reaches the engines of all its legs, and no others."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton.router import RouterConfig, build_app
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.collector import Collector, attributes
from testkit.servers.fake_serving import KEY, FakeEngine, served, status_of
from testkit.servers.fake_sglang import SglangPair
from testkit.servers.fake_vllm import FakeVllm
from testkit.servers.fleets import QUICK
from testkit.servers.vllm_pair import WAYS, Pair
from tests.router.test_spans import DOCUMENTED

ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACE = {"traceparent": f"00-{ID}-00f067aa0ba902b7-01", "tracestate": "a=1"}


async def ask(session: aiohttp.ClientSession, url: str, headers: dict[str, str], **body: Any) -> None:
    asked = {"prompt": [10, 11, 12], "max_tokens": 6, "temperature": 0, **body}
    async with session.post(f"{url}/v1/completions", json=asked, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_the_trace_goes_on_to_vllm_servers(
    directory: Path, name: str, seed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton.openai.records")
    pair = Pair(directory, name, seed)
    async with pair.run() as (url, session):
        await ask(session, url, TRACE)
        legs = [trace for server in (pair.p, pair.d) for trace in server.traces if trace[0] != "identify"]
        assert {role for role, *_ in legs} == {"prefill", "decode"}
        assert {trace[1:] for trace in legs} == {tuple(TRACE.values())}
        for server in (pair.p, pair.d):
            server.traces.clear()
        await ask(session, url, {})
        await ask(session, url, {"traceparent": "nonsense", "tracestate": "a=1"})
        assert {trace[1:] for server in (pair.p, pair.d) for trace in server.traces} == {(None, None)}
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [line["trace_id"] for line in lines] == [ID, None, None]


async def test_the_trace_goes_on_to_batons_engines(directory: Path) -> None:
    handed: dict[bytes, Any] = {}
    seen: list[tuple[str, str | None]] = []

    def engine(role: str) -> web.Application:
        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.method == "POST":
                seen.append((role, request.headers.get("traceparent")))
            answer: web.StreamResponse = await handler(request)
            return answer

        made = FakeEngine(directory, role=role, handed=handed)
        app = build_engine_app(made, Tokenizer.load(directory))  # type: ignore[arg-type]
        app.middlewares.append(note)
        return app

    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(engine(role))) for role in ("prefill", "decode")]
        config = RouterConfig(prefill=(urls[0],), decode=(urls[1],), ticket_key=KEY, timers=QUICK)
        url = await stack.enter_async_context(served(await build_app(config)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await ask(session, url, TRACE, n=2)
        assert sorted(seen) == [(role, TRACE["traceparent"]) for role in ("decode", "decode", "prefill", "prefill")]


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_the_router_makes_the_spans_of_vllm_servers_too(directory: Path, name: str, seed: bool) -> None:
    """They do not tell their times, so the handoff lasts from the prefill server's token to the decode server's."""
    pair, collector = Pair(directory, name, seed), Collector()
    async with collector.run() as endpoint, pair.run(otlp_traces_endpoint=endpoint) as (url, session):
        await ask(session, url, TRACE)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"llm_request", "baton.prefill_leg", "baton.decode_leg", "baton.handoff", "baton.decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {ID}
    check_estimated_handoff(spans)


def check_estimated_handoff(spans: dict[str, Any]) -> None:
    handoff, decode_leg = spans["baton.handoff"], spans["baton.decode_leg"]
    assert attributes(handoff)["baton.handoff.estimated"] is True
    assert handoff.parent_span_id == decode_leg.span_id
    assert {link.span_id for link in handoff.links} == {spans["baton.prefill_leg"].span_id, decode_leg.span_id}
    assert handoff.end_time_unix_nano == spans["baton.decode"].start_time_unix_nano


TOLD_BY_VLLM = {
    "queue_time_ms": 0.1,
    "time_to_first_token_ms": 0.2,
    "speculative_decoding": {"per_step_accepted": [1, 2, 0, 1], "per_step_drafted": [2, 2, 2, 2], "num_spec_tokens": 2},
}


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_vllm_servers_that_tell_their_metrics_have_queue_prefill_and_verifications(
    directory: Path, name: str, seed: bool
) -> None:
    """`--enable-per-request-metrics --per-request-spec-decode-metrics detailed`, which are vLLM's own flags. The first
    verification of a handed-off request is of placeholders."""
    pair, collector = Pair(directory, name, seed, num_drafts=2, metrics=TOLD_BY_VLLM), Collector()
    pair.p.metrics = {"queue_time_ms": 0.1, "time_to_first_token_ms": 0.2, "speculative_decoding": None}
    async with collector.run() as endpoint, pair.run(otlp_traces_endpoint=endpoint) as (url, session):
        await ask(session, url, TRACE)
        (group,) = (await status_of(session, url))["acceptance"]["groups"]
    assert (group["route"], group["num_requests"]) == ("handed_off", 1)
    assert group["first_verification"]["acceptance"] == 1.0
    assert group["later_verifications"]["acceptance"] == 0.25
    spans = {span.name: span for span in collector.spans}
    engine_spans = {"baton.queue", "baton.prefill", "baton.first_verification"}
    legs = {"llm_request", "baton.prefill_leg", "baton.decode_leg", "baton.handoff", "baton.decode"}
    assert set(spans) == engine_spans | legs
    assert len(collector.spans) == len(spans), "the decode server's queue is the handoff"
    check_estimated_handoff(spans)
    queue, prefill, leg = (spans[f"baton.{name}"] for name in ("queue", "prefill", "prefill_leg"))
    assert {queue.parent_span_id, prefill.parent_span_id} == {leg.span_id}
    assert leg.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano <= prefill.end_time_unix_nano
    assert attributes(spans["llm_request"])["gen_ai.latency.time_in_queue"] == pytest.approx(1e-4)
    verification = spans["baton.first_verification"]
    assert attributes(verification) == {"baton.drafts": 2, "baton.accepted": 2}
    assert verification.parent_span_id == spans["baton.decode_leg"].span_id
    assert verification.end_time_unix_nano < spans["baton.decode"].end_time_unix_nano, "before the leg's end"


class CutOnce(FakeVllm):
    """Its first decode leg is cut off."""

    async def _complete(self, request: web.Request, body: dict[str, Any], role: str) -> web.StreamResponse:
        try:
            return await super()._complete(request, body, role)
        finally:
            if role == "decode":
                self.fail = None


# Attributes that vLLM's servers do not tell.
UNTOLD = {
    "baton.prefill": {"baton.num_chunks"},
    "baton.handoff": {f"baton.handoff.{name}" for name in ("bytes", "runs", "integrity")},
}


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_a_failover_between_vllm_servers_is_one_trace(directory: Path, name: str, seed: bool) -> None:
    pair, collector = Pair(directory, name, seed, num_drafts=2, metrics=TOLD_BY_VLLM), Collector()
    pair.d.__class__ = CutOnce
    pair.d.fail, pair.d.fail_role, pair.d.fail_after = "cut", "decode", 3
    async with collector.run() as endpoint, pair.run(otlp_traces_endpoint=endpoint) as (url, session):
        await ask(session, url, TRACE)
    spans = collector.spans
    assert {span.trace_id.hex() for span in spans} == {ID}
    by_id = {span.span_id: span for span in spans}
    assert [span.name for span in spans if span.parent_span_id not in by_id] == ["llm_request"]
    for kind in {span.name for span in spans}:
        told = [set(attributes(span)) for span in spans if span.name == kind]
        assert told == [DOCUMENTED[kind] - UNTOLD.get(kind, set())] * len(told), kind
    names = [span.name for span in spans]
    assert set(names) == set(DOCUMENTED) - {"baton.local_leg", "baton.prefill_chunk"}
    assert [names.count(f"baton.{kind}") for kind in ("prefill_leg", "decode_leg", "recovery")] == [2, 2, 1]
    assert [span.name for span in spans if span.status.code == 2] == ["baton.decode", "baton.decode_leg"]
    legs = {f"00-{ID}-{span.span_id.hex()}-01" for span in spans if span.name.endswith("_leg")}
    asked = {trace[1] for server in (pair.p, pair.d) for trace in server.traces if trace[0] in ("prefill", "decode")}
    assert asked == legs


@pytest.mark.parametrize(
    "told",
    [
        None,
        "nonsense",
        {"queue_time_ms": "soon"},
        {"queue_time_ms": 1.0},
        {"speculative_decoding": {"per_step_accepted": [1], "per_step_drafted": []}},
    ],
)
async def test_metrics_that_cannot_be_read_say_nothing(directory: Path, told: Any) -> None:
    pair, collector = Pair(directory, num_drafts=2, metrics=told), Collector()
    async with collector.run() as endpoint, pair.run(otlp_traces_endpoint=endpoint) as (url, session):
        await ask(session, url, TRACE)
        assert (await status_of(session, url))["acceptance"]["groups"] == []
    assert not {"baton.queue", "baton.first_verification"} & {span.name for span in collector.spans}


async def test_the_router_makes_the_spans_of_sglang_servers_too(directory: Path) -> None:
    """The decode server is lost after a token, so the request is handed off again."""
    pair, collector = SglangPair(directory), Collector()
    pair.d.dies = True
    async with collector.run() as endpoint, pair.run(otlp_traces_endpoint=endpoint) as (url, session):
        await ask(session, url, TRACE)
    names = [span.name for span in collector.spans]
    assert set(names) == {
        "llm_request",
        "baton.prefill_leg",
        "baton.decode_leg",
        "baton.queue",
        "baton.prefill",
        "baton.handoff",
        "baton.decode",
        "baton.recovery",
    }
    assert {span.trace_id.hex() for span in collector.spans} == {ID}
    prefills = [span.span_id for span in collector.spans if span.name == "baton.prefill_leg"]
    queued = [span.parent_span_id for span in collector.spans if span.name == "baton.queue"]
    assert sorted(queued) == sorted(prefills), "the decode server's queue is the handoff"
    assert names.count("baton.recovery") == 1
    (recovery,) = [span for span in collector.spans if span.name == "baton.recovery"]
    assert "payload is not completed" in attributes(recovery)["baton.recovery.cause"]
    assert [span.name for span in collector.spans if span.status.code == 2] == ["baton.decode", "baton.decode_leg"]
    again = {span.name: span for span in collector.spans}
    assert attributes(again["baton.decode_leg"])["baton.attempt"] == 2
    check_estimated_handoff(again)
    legs = {f"00-{ID}-{span.span_id.hex()}-01" for span in collector.spans if span.name.endswith("_leg")}
    assert {*pair.p.traces, *pair.d.traces} == legs, "a server's own spans are children of its leg"

"""A decode leg's handoff as a span of vLLM's trace, with OpenTelemetry's SDK, which vLLM's environment has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.testing import RecordingAgent
from baton.vllm.handoff_span import MARKS, span_maker
from baton.vllm.memory.geometry import describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from baton.vllm.steps import AnnounceDecode, OpenDecode, StepNews
from baton.vllm.worker import WorkerSide
from testkit.handoffs.tickets import make_ticket

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Processor(export.SimpleSpanProcessor):  # type: ignore[name-defined,misc]
    """`is_broken`: no span can be made."""

    is_broken = False

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.is_broken:
            raise RuntimeError("broken")


@pytest.fixture(scope="module")
def processor() -> Processor:
    """OpenTelemetry takes one provider in a process."""
    made, provider = Processor(in_memory.InMemorySpanExporter()), sdk.TracerProvider()
    provider.add_span_processor(made)
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def spans(processor: Processor) -> Iterator[Any]:
    yield processor.span_exporter.get_finished_spans
    processor.span_exporter.clear()
    processor.is_broken = False


def decode_leg(traceparent: str | None, *ends: Any) -> None:
    """A decode leg from its arrival to the events `ends`, made of its key."""
    caches = {"model.layers.0.attn": torch.zeros(4, 2, 32, 16)}
    groups = split_tables([CacheTable(0, "full", None, 32, tuple(caches))], num_target_layers=1)
    layout = describe_caches(caches, groups, dict.fromkeys(caches, "k_by_dimension"))
    side = WorkerSide(layout, on_decode_end=span_maker("sampled"))
    side.bind(RecordingAgent())
    ticket = SignedTicket.of(make_ticket(), "signed")
    side.begin(StepNews(announced=[AnnounceDecode("r", ticket, 7, traceparent)]))
    side.post(ev.DecodeAdmitted(ticket.key))
    side.results()
    side.begin(StepNews(receives=[OpenDecode("r", ticket, 33, 0, ([1, 2],), parked=True)]))
    for end in ends:
        side.post(end(ticket.key))
    side.results()


def committed(key: Any) -> ev.DecodeCommitted:
    return ev.DecodeCommitted(key, Seeds(first_token=7, draft_token_ids=[]), 4096, 3, copied=(1.0, 3.0))


def test_a_handoff_is_a_span_of_the_decode_leg(spans: Any) -> None:
    decode_leg(TRACEPARENT, committed)
    (span,) = spans()
    assert span.name == "baton.handoff_transfer"
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
    assert tuple(event.name for event in span.events) == MARKS
    times = {event.name: event.timestamp for event in span.events}
    assert times["announced"] <= times["admitted"] <= times["registered"] == span.start_time
    assert span.start_time <= times["committed"] == span.end_time
    assert times["last bytes"] - times["first bytes"] == pytest.approx(2e9)
    assert dict(span.attributes) == {
        "baton.handoff.mode": "push",
        "baton.handoff.integrity": "sampled",
        "baton.handoff.bytes": 4096,
        "baton.handoff.runs": 3,
    }
    assert span.status.is_unset


def test_a_handoff_that_failed_says_why(spans: Any) -> None:
    decode_leg(TRACEPARENT, lambda key: ev.DecodeFailed(key, "peer_lost", "silent", True), ev.DecodeReleased)
    (span,) = spans()
    assert span.status.description == "peer_lost: silent"
    assert [event.name for event in span.events] == ["announced", "admitted", "registered"]


def test_a_request_without_a_trace_has_no_span(spans: Any) -> None:
    decode_leg(None, committed)
    assert spans() == ()


def test_a_span_that_cannot_be_made_does_no_harm(
    processor: Processor, spans: Any, caplog: pytest.LogCaptureFixture
) -> None:
    processor.is_broken = True
    decode_leg(TRACEPARENT, committed)
    assert spans() == ()
    assert [record.message for record in caplog.records] == ["the span of a handoff could not be made"]

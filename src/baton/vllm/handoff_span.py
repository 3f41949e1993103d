"""A decode leg's handoff as a span in vLLM's own trace, exported by workers according to `--otlp-traces-endpoint`."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

from baton.handoff.protocol import events as ev
from baton.vllm.legs import WorkerDecode

log = logging.getLogger(__name__)
NAME = "baton.handoff_transfer"
MARKS = ("announced", "admitted", "registered", "first bytes", "last bytes", "committed")
DecodeEnd = ev.DecodeCommitted | ev.DecodeFinished | ev.DecodeReleased
OnDecodeEnd = Callable[[WorkerDecode, DecodeEnd], None]


def span_maker(integrity: str) -> OnDecodeEnd:
    def end(leg: WorkerDecode, event: DecodeEnd) -> None:
        if leg.traceparent is None or "registered" not in leg.marks:
            return
        try:
            _export(leg, event, integrity)
        except Exception:
            log.exception("the span of a handoff could not be made")

    return end


def _export(leg: WorkerDecode, event: DecodeEnd, integrity: str) -> None:
    now = time.monotonic()
    ahead = time.time() - now
    marks = dict(leg.marks)
    attributes: dict[str, Any] = {"baton.handoff.mode": leg.mode, "baton.handoff.integrity": integrity}
    if isinstance(event, ev.DecodeCommitted):
        marks |= dict(zip(("first bytes", "last bytes"), event.copied or (), strict=False))
        marks["committed"] = now
        attributes |= {"baton.handoff.bytes": event.num_bytes, "baton.handoff.runs": event.num_runs}
    api = importlib.import_module("opentelemetry.trace")
    propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    parent = propagation.TraceContextTextMapPropagator().extract({"traceparent": leg.traceparent})
    start = int((marks["registered"] + ahead) * 1e9)
    span = api.get_tracer("baton").start_span(NAME, parent, attributes=attributes, start_time=start)
    for name in MARKS:
        if name in marks:
            span.add_event(name, timestamp=int((marks[name] + ahead) * 1e9))
    if leg.failure:
        span.set_status(api.Status(api.StatusCode.ERROR, leg.failure))
    span.end(end_time=int((now + ahead) * 1e9))

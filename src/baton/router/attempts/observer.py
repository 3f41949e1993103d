from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from baton.errors import RequestError, is_refusal
from baton.observe.acceptance import HANDED_OFF, AcceptanceTotals, Group, RequestAcceptance
from baton.observe.alarm import AcceptanceAlarms
from baton.observe.recent import RecentRequests
from baton.observe.timeline import RequestTimeline
from baton.observe.tracing.request_trace import LegTrace, RequestTrace
from baton.observe.tracing.span import Value
from baton.observe.tracing.tracer import Tracer
from baton.openai.http.caller import CALLER
from baton.openai.http.metrics import Row, gauge, histogram
from baton.openai.http.tracing import TRACE, Trace
from baton.router.leg_tasks import LegWatch
from baton.router.pooled_engine import PooledEngine
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, LegRole, Mode, TokenChunk


class ObservedRequest(msgspec.Struct, frozen=True):
    """A running request, as sent to engines."""

    request: GenerateRequest
    timeline: RequestTimeline
    _observer: RequestObserver

    def __enter__(self) -> ObservedRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._observer.end(self, error)

    def on_route(self, why: str, engines: Sequence[str]) -> None:
        self.timeline.on_route(time.monotonic(), why, engines)

    def on_chunk(self, chunk: TokenChunk) -> None:
        self.timeline.on_tokens(time.monotonic(), len(chunk.token_ids), chunk.accepted, chunk.drafted)
        if chunk.queued_s is not None:
            self.timeline.queued_s = chunk.queued_s
        if chunk.finish_reason is not None:
            self._observer.on_last_chunk(self.request, self.timeline, chunk)


class AcceptanceState(TypedDict):
    alarms: list[str]
    num_comparisons: int
    groups: list[dict[str, object]]


class RequestObserver:
    """Keeps the timelines of requests, and counts acceptance of those whose tokens after the first all come from one
    attempt. With a `tracer`, requests also have spans.
    """

    def __init__(self, tracer: Tracer | None = None, model_name: Callable[[], str] = lambda: "") -> None:
        self._tracer, self._model_name = tracer, model_name
        self._traces: dict[str, RequestTrace] = {}
        self.totals = AcceptanceTotals()
        self.alarms = AcceptanceAlarms()
        self.recent = RecentRequests()
        self._running: dict[str, RequestTimeline] = {}

    def observing(self, request: GenerateRequest) -> ObservedRequest:
        caller, name = CALLER.get(), request.request_id
        http_id = "" if caller is None else caller.request_id
        timeline = RequestTimeline(name, http_id, time.monotonic(), time.time(), len(request.prompt_token_ids))
        self._running[name] = timeline
        self.recent.begin(timeline)
        trace = self._begin_trace(timeline)
        if trace is not None:
            request = msgspec.structs.replace(request, timings=True)
        return ObservedRequest(request, timeline, self)

    def end(self, observed: ObservedRequest, error: BaseException | None) -> None:
        timeline = observed.timeline
        if isinstance(error, Exception):
            finish = "refused" if isinstance(error, RequestError) else "error"
            timeline.on_end(time.monotonic(), finish, str(error) or type(error).__name__)
        self._running.pop(timeline.id, None)
        timeline.on_end(time.monotonic(), "abort")
        self.recent.end(timeline)
        if (trace := self._traces.pop(timeline.id, None)) is not None:
            trace.end(self._request_attributes(observed.request.sampling_params))

    def on_last_chunk(self, request: GenerateRequest, timeline: RequestTimeline, chunk: TokenChunk) -> None:
        finish = "refused" if is_refusal(chunk.error) else chunk.finish_reason or ""
        timeline.on_end(time.monotonic(), finish, chunk.error or "")
        if chunk.finish_reason not in ("stop", "length") or timeline.resumed or not any(timeline.drafted):
            return
        prefill = timeline.engines[0] if timeline.route == HANDED_OFF else ""
        group = Group(timeline.route, prefill, timeline.engines[-1])
        prompt = hash(tuple(request.prompt_token_ids))
        acceptance = RequestAcceptance(group, timeline.accepted, timeline.drafted, prompt)
        self.totals.observe(acceptance)
        self.alarms.observe(acceptance)

    def on_recovery(self, request_id: str, rung: str, cause: BaseException) -> None:
        if (timeline := self._running.get(request_id)) is not None:
            timeline.on_recovery(time.monotonic(), rung, str(cause))
        if (trace := self._traces.get(request_id)) is not None:
            trace.on_recovery(rung, str(cause))

    def _begin_trace(self, timeline: RequestTimeline) -> RequestTrace | None:
        if self._tracer is None:
            return None
        client = TRACE.get()
        trace = self._tracer.begin(timeline, None if client is None else client.traceparent)
        if trace is not None:
            self._traces[timeline.id] = trace
        return trace

    def watch_legs(
        self, attempt_id: str, engines: Mapping[LegRole, PooledEngine], mode: Mode
    ) -> dict[LegRole, list[LegWatch]]:
        # Ids of later attempts end with their number.
        trace = self._traces.get(attempt_id) or self._traces.get(attempt_id.rpartition(".")[0])
        if trace is None:
            return {leg: [] for leg in engines}
        alone = len(engines) == 1
        return {leg: [_TracedLeg(trace, leg, engine, alone, mode)] for leg, engine in engines.items()}

    def _request_attributes(self, params: SamplingParams) -> dict[str, Value]:
        return {
            "gen_ai.response.model": self._model_name(),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }

    def describe(self) -> AcceptanceState:
        return {
            "alarms": [alarm.describe() for alarm in self.alarms.alarms()],
            "num_comparisons": self.alarms.num_comparisons(),
            "groups": self.totals.describe(),
        }

    def rows(self) -> Iterator[Row]:
        for stage, count in self.recent.stages().items():
            yield gauge("router_requests_by_stage", "Running requests by stage.", count, stage=stage)
        for group, totals in self.totals:
            labels = {"route": group.route, "prefill_engine": group.prefill, "decode_engine": group.decode}
            text = "Accepted drafts of a request's first verification."
            yield histogram("router_first_verification_accepted", text, totals.first.histogram, **labels)
            text = "Accepted drafts of each later verification."
            yield histogram("router_later_verifications_accepted", text, totals.later.histogram, **labels)
        text = "Alarms on acceptance that hold now."
        yield gauge("router_acceptance_alarms", text, len(self.alarms.alarms()))


@dataclass(slots=True)
class _TracedLeg(LegWatch):
    trace: RequestTrace
    role: LegRole
    engine: PooledEngine
    alone: bool
    mode: Mode
    _leg: LegTrace | None = None

    async def begin(self) -> None:
        self._leg = self.trace.begin_leg(self.role, self.engine.name, self.engine.url, self.alone, self.mode)
        given = TRACE.get()
        TRACE.set(Trace(self._leg.span.traceparent, None if given is None else given.tracestate))

    def on_chunk(self, chunk: TokenChunk) -> None:
        if self._leg is not None:
            self.trace.on_chunk(self._leg, chunk)

    def on_end(self, error: Exception | None) -> None:
        if self._leg is not None:
            self.trace.end_leg(self._leg, "" if error is None else str(error) or type(error).__name__)

"""The router's backend with observers: each request has a timeline, and its verifications are counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

import msgspec

from baton.observe.acceptance import HANDED_OFF, AcceptanceTotals, Group, RequestAcceptance
from baton.observe.alarm import AcceptanceAlarms
from baton.observe.recent import RecentRequests
from baton.observe.timeline import RequestTimeline
from baton.observe.tracing.request_trace import RequestTrace
from baton.observe.tracing.span import Value
from baton.observe.tracing.tracer import Tracer
from baton.openai import ServedModel
from baton.openai.backend import OnRoute
from baton.openai.http.caller import CALLER
from baton.openai.http.metrics import Row, gauge, histogram
from baton.openai.http.tracing import TRACE
from baton.router.backend import RouterBackend
from baton.router.connectors.base import Legs
from baton.router.pooled_engine import PooledEngine
from baton.router.traced_legs import traced_legs
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest, LegRole, Mode, TokenChunk


class ObservedBackend:
    """A `Backend` that passes everything on to a `RouterBackend`.

    Acceptance is counted for requests whose tokens after the first all come from one attempt: drafts of a resumed
    request are not compared. With a `tracer`, requests have spans too.
    """

    def __init__(self, backend: RouterBackend, tracer: Tracer | None = None) -> None:
        self.backend = backend
        self.tracer = tracer
        self._traces: dict[str, RequestTrace] = {}
        self.totals = AcceptanceTotals()
        self.alarms = AcceptanceAlarms()
        self.recent = RecentRequests()
        self._running: dict[str, RequestTimeline] = {}
        backend.on_recovery = self._on_recovery
        if tracer is not None:
            backend.on_legs = self._on_legs

    @property
    def allows_kv_mode(self) -> bool:
        return self.backend.allows_kv_mode

    def model(self) -> ServedModel:
        return self.backend.model()

    def check(self, params: SamplingParams) -> None:
        self.backend.check(params)

    async def generate(
        self, request: GenerateRequest, kv_mode: Mode | None = None, on_route: OnRoute | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        caller, name = CALLER.get(), request.request_id
        http_id = "" if caller is None else caller.request_id
        num_prompt = len(request.prompt_token_ids)
        timeline = RequestTimeline(name, http_id, time.monotonic(), time.time(), num_prompt)

        def routed(why: str, engines: Sequence[str] = ()) -> None:
            timeline.on_route(time.monotonic(), why, engines)
            if on_route is not None:
                on_route(why, engines)

        self._running[name] = timeline
        self.recent.begin(timeline)
        trace = self._begin_trace(timeline)
        if trace is not None:
            request = msgspec.structs.replace(request, timings=True)
        try:
            async with contextlib.aclosing(self.backend.generate(request, kv_mode, routed)) as chunks:
                async for chunk in chunks:
                    timeline.on_tokens(time.monotonic(), len(chunk.token_ids), chunk.accepted, chunk.drafted)
                    if chunk.finish_reason is not None:
                        self._ended(timeline, chunk)
                    yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            timeline.on_end(time.monotonic(), "abort")
            raise
        except Exception as error:
            timeline.on_end(time.monotonic(), "error", str(error) or type(error).__name__)
            raise
        finally:
            self._running.pop(name, None)
            timeline.on_end(time.monotonic(), "abort")
            self.recent.end(timeline)
            if trace is not None:
                del self._traces[name]
                trace.end(self._request_attributes(request.sampling_params))

    def _ended(self, timeline: RequestTimeline, chunk: TokenChunk) -> None:
        timeline.on_end(time.monotonic(), chunk.finish_reason or "", chunk.error or "")
        if chunk.finish_reason not in ("stop", "length") or timeline.resumed or not any(timeline.drafted):
            return
        prefill = timeline.engines[0] if timeline.route == HANDED_OFF else ""
        group = Group(timeline.route, prefill, timeline.engines[-1])
        acceptance = RequestAcceptance(group, timeline.accepted, timeline.drafted)
        self.totals.observe(acceptance)
        self.alarms.observe(acceptance)

    def _on_recovery(self, request_id: str, rung: str, cause: BaseException) -> None:
        if (timeline := self._running.get(request_id)) is not None:
            timeline.on_recovery(time.monotonic(), rung, str(cause))
        if (trace := self._traces.get(request_id)) is not None:
            trace.on_recovery(rung, str(cause))

    def _begin_trace(self, timeline: RequestTimeline) -> RequestTrace | None:
        if self.tracer is None:
            return None
        client = TRACE.get()
        trace = self.tracer.begin(timeline, None if client is None else client.traceparent)
        if trace is not None:
            self._traces[timeline.id] = trace
        return trace

    def _on_legs(self, attempt_id: str, legs: Legs, engines: Mapping[LegRole, PooledEngine], mode: Mode) -> Legs:
        # The ids of later attempts end with their number.
        trace = self._traces.get(attempt_id) or self._traces.get(attempt_id.rpartition(".")[0])
        return legs if trace is None else traced_legs(trace, legs, engines, mode)

    def _request_attributes(self, params: SamplingParams) -> dict[str, Value]:
        return {
            "gen_ai.response.model": self.backend.model().name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }

    def describe(self) -> dict[str, object]:
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

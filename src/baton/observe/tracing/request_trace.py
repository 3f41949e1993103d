"""The spans of one request: the request, its legs, the engines' work for them, the handoff, and recoveries
(docs/traces.md). A span is exported when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.observe.timeline import RequestTimeline
from baton.observe.tracing.span import Span, SpanEvent, SpanSink, Value
from baton.wire import LegRole, LegTimings, TokenChunk

_NS = 1_000_000_000
# Times of `LegTimings` that are events of a handoff's span, in order.
_EVENTS = ("announced", "admitted", "registered", "first_bytes", "last_bytes", "committed")


@dataclass(frozen=True, slots=True)
class RemoteParent:
    """The client's `traceparent`: trace id, span id, and whether it samples."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def of(cls, traceparent: str) -> RemoteParent:
        _, trace_id, span_id, flags = traceparent.split("-")[:4]
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


@dataclass(slots=True)
class LegTrace:
    """`first`, `second`: arrival of the first tokens and the next ones (monotonic seconds)."""

    span: Span
    role: LegRole
    alone: bool
    began: float
    first: float | None = None
    second: float | None = None
    timings: LegTimings | None = None
    verified: bool = False


@dataclass(slots=True)
class RequestTrace:
    """The spans of one sampled request. Times given are monotonic seconds."""

    sinks: Sequence[SpanSink]
    timeline: RequestTimeline
    root: Span
    mode: str = ""
    attempts: int = 0
    _legs: dict[str, LegTrace] = field(default_factory=dict)
    _recovery: Span | None = None
    _scheduled: float | None = None  # when an engine first computed the prompt
    _now: Callable[[], float] = time.monotonic

    @classmethod
    def begin(
        cls, sinks: Sequence[SpanSink], timeline: RequestTimeline, trace_id: int, parent_id: int | None
    ) -> RequestTrace:
        start = int(timeline.began_at * _NS)
        root = Span("llm_request", trace_id, start, parent_id, "server", request_id=timeline.id)
        return cls(sinks, timeline, root)

    def begin_leg(self, role: LegRole, engine: str, url: str, alone: bool, mode: str) -> LegTrace:
        """Call it before a leg's request is sent, with the `traceparent` of the returned span."""
        now = self._now()
        self.attempts += role == "decode"
        span = self._child(f"baton.{'local' if alone else role}_leg", now, self.root, "router")
        span.kind = "client"
        attributes: dict[str, Value] = {"baton.engine": engine, "server.address": url}
        span.attributes = {**attributes, "baton.attempt": max(self.attempts, 1)}
        self.mode = mode
        leg = LegTrace(span, role, alone, now)
        self._legs[role] = leg
        self._end_recovery(now)
        return leg

    def on_chunk(self, leg: LegTrace, chunk: TokenChunk) -> None:
        if leg.second is not None and chunk.finish_reason is None and (leg.verified or not chunk.accepted):
            return  # the common case
        now = self._now()
        is_first = leg.first is None and bool(chunk.token_ids)
        if is_first:
            leg.first = now
        elif chunk.token_ids and leg.second is None:
            leg.second = now
        if chunk.timings is not None:
            leg.timings = chunk.timings
            self._engine_spans(leg, leg.first or now)
        if is_first and leg.role == "decode" and not leg.alone:
            self._handoff(leg, now)
        if chunk.accepted and not leg.verified:
            leg.verified = True
            # vLLM reports verifications at the end; the first one produced the second tokens.
            late = chunk.finish_reason is not None and leg.second is not None
            span = self._child(
                "baton.first_verification", _decodes_since(leg, leg.first or now), leg.span, _engine(leg)
            )
            drafted = chunk.drafted[0] if chunk.drafted else 0
            span.attributes = {"baton.drafts": drafted, "baton.accepted": chunk.accepted[0]}
            self._export(span, leg.second if late and leg.second is not None else now)
        if chunk.finish_reason == "error":
            leg.span.error = chunk.error or "error"

    def end_leg(self, leg: LegTrace, error: str = "") -> None:
        now = self._now()
        leg.span.error = leg.span.error or error
        if leg.first is not None and (leg.role == "decode" or leg.alone):
            span = self._child("baton.decode", _decodes_since(leg, leg.first), leg.span, _engine(leg))
            span.error = leg.span.error
            self._export(span, now)
        self._export(leg.span, now)

    def on_recovery(self, rung: str, cause: str) -> None:
        now = self._now()
        self._end_recovery(now)
        self._recovery = self._child("baton.recovery", now, self.root, "router")
        self._recovery.attributes = {
            "baton.recovery.rung": rung,
            "baton.recovery.cause": cause[:500],
            "baton.recovery.known_tokens": self.timeline.num_output_tokens,
        }

    def end(self, attributes: dict[str, Value]) -> None:
        """Legs may still be read to their end."""
        self._end_recovery(self._now())
        timeline, root = self.timeline, self.root
        root.attributes |= {
            "gen_ai.request.id": timeline.id,
            "gen_ai.usage.prompt_tokens": timeline.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": timeline.num_output_tokens,
            "baton.route": timeline.route,
            "baton.engines": timeline.engines,
            "baton.num_attempts": self.attempts,
            **attributes,
        }
        if timeline.first is not None and timeline.last is not None:
            root.attributes["gen_ai.latency.time_to_first_token"] = timeline.first - timeline.began
            root.attributes["gen_ai.latency.time_in_model_decode"] = timeline.last - timeline.first
            if self._scheduled is not None:
                root.attributes["gen_ai.latency.time_in_model_prefill"] = timeline.first - self._scheduled
                root.attributes["gen_ai.latency.time_in_model_inference"] = timeline.last - self._scheduled
        if timeline.finish in ("stop", "length"):
            root.attributes["gen_ai.response.finish_reasons"] = (timeline.finish,)
        ended = timeline.ended if timeline.ended is not None else self._now()
        root.attributes["gen_ai.latency.e2e"] = ended - timeline.began
        root.error = timeline.error
        self._export(root, ended)

    def _engine_spans(self, leg: LegTrace, now: float) -> None:
        """Queue and prefill of an engine that reported its times; they begin when the leg's request was sent. Not of
        vLLM's and SGLang's decode legs, whose queue includes the handoff."""
        timings = leg.timings
        if timings is None or timings.started is None or timings.sampled is None:
            return
        if leg.role == "decode" and not leg.alone and not timings.chunks:
            return
        started, sampled = (min(leg.began + since, now) for since in (timings.started, timings.sampled))
        self._export(self._child("baton.queue", leg.began, leg.span, _engine(leg)), started)
        prefill = self._child("baton.prefill", started, leg.span, _engine(leg))
        self._chunks(leg, prefill, timings, sampled)
        self._export(prefill, sampled)
        if self._scheduled is None:
            self._scheduled = started
            self.root.attributes["gen_ai.latency.time_in_queue"] = timings.started

    def _chunks(self, leg: LegTrace, prefill: Span, told: LegTimings, sampled: float) -> None:
        if told.chunks:
            prefill.attributes["baton.num_chunks"] = len(told.chunks)
        begins = [min(leg.began + since, sampled) for since, _ in told.chunks]
        if len(begins) > 1:
            for begin, end, (_, num_tokens) in zip(begins, [*begins[1:], sampled], told.chunks, strict=True):
                chunk = self._child("baton.prefill_chunk", begin, prefill, _engine(leg))
                chunk.attributes["baton.num_tokens"] = num_tokens
                self._export(chunk, end)

    def _handoff(self, leg: LegTrace, now: float) -> None:
        """The handoff on D, from REGISTER to COMMIT. If the engine does not report it (vLLM): from the prefill engine's
        token to the decode engine's."""
        prefill, timings = self._legs.get("prefill"), leg.timings
        prefilled = None if prefill is None else prefill.first
        known, begin, end = False, leg.began if prefilled is None else prefilled, now
        if timings is not None and timings.registered is not None and timings.committed is not None:
            known = True
            begin, end = min(leg.began + timings.registered, now), min(leg.began + timings.committed, now)
        span = self._child("baton.handoff", begin, leg.span, _engine(leg))
        span.links = [leg.span.span_id] if prefill is None else [prefill.span.span_id, leg.span.span_id]
        span.attributes = {"baton.handoff.mode": self.mode, "baton.handoff.estimated": not known}
        if timings is not None and known:
            for name in _EVENTS:
                since = getattr(timings, name)
                if since is not None:
                    span.events.append(SpanEvent(name.replace("_", " "), self._ns(min(leg.began + since, now))))
            span.attributes |= {"baton.handoff.bytes": timings.num_bytes, "baton.handoff.runs": timings.num_runs}
            if timings.integrity:
                span.attributes["baton.handoff.integrity"] = timings.integrity
        if prefilled is not None and end > begin:
            hidden = (min(max(prefilled, begin), end) - begin) / (end - begin)
            span.attributes["baton.handoff.hidden_share"] = hidden
        self._export(span, end)

    def _end_recovery(self, now: float) -> None:
        if self._recovery is not None:
            self._export(self._recovery, now)
            self._recovery = None

    def _child(self, name: str, at: float, parent: Span, process: str) -> Span:
        start, root = self._ns(at), self.root
        return Span(name, root.trace_id, start, parent.span_id, process=process, request_id=root.request_id)

    def _export(self, span: Span, at: float) -> None:
        span.end = max(self._ns(at), span.start)
        for sink in self.sinks:
            sink.export(span)

    def _ns(self, at: float) -> int:
        """Monotonic seconds as nanoseconds since 1970, by the clock read at the request's arrival."""
        return int((self.timeline.began_at + at - self.timeline.began) * _NS)


def _decodes_since(leg: LegTrace, arrived: float) -> float:
    """Decoding begins with the commit, if D told when that was. `arrived`: D's first tokens."""
    told = leg.timings
    return arrived if told is None or told.committed is None else min(leg.began + told.committed, arrived)


def _engine(leg: LegTrace) -> str:
    return str(leg.span.attributes["baton.engine"])

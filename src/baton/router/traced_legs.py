"""Legs with spans: each leg's request carries the `traceparent` of its span, and its chunks are noted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from baton.observe.tracing.request_trace import LegTrace, RequestTrace
from baton.openai.http.tracing import TRACE, Trace
from baton.router.connectors.base import Legs
from baton.router.join import Chunks
from baton.router.pooled_engine import PooledEngine
from baton.wire import LegRole, Mode


def traced_legs(trace: RequestTrace, legs: Legs, engines: Mapping[LegRole, PooledEngine], mode: Mode) -> Legs:
    alone = len(legs.chunks) == 1
    chunks = {leg: _noted(trace, leg, engines[leg], alone, mode, stream) for leg, stream in legs.chunks.items()}
    return dataclasses.replace(legs, chunks=chunks)


async def _noted(
    trace: RequestTrace, role: LegRole, engine: PooledEngine, alone: bool, mode: Mode, chunks: Chunks
) -> Chunks:
    leg: LegTrace | None = None
    error = ""
    try:
        # In the leg's own task, so no other request's trace is changed.
        leg = trace.begin_leg(role, engine.name, engine.url, alone, mode)
        given = TRACE.get()
        TRACE.set(Trace(leg.span.traceparent, None if given is None else given.tracestate))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                trace.on_chunk(leg, chunk)
                yield chunk
    except Exception as failed:
        error = str(failed) or type(failed).__name__
        raise
    finally:
        if leg is not None:
            trace.end_leg(leg, error)

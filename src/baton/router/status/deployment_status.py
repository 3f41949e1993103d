"""The router's `/status`: its engines, outcomes of requests, and advice, over all processes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.errors import BatonError
from baton.observe.faults import EngineView, count_faults, find_faults
from baton.router.pool import EnginePool
from baton.router.pooled_engine import PooledEngine
from baton.router.router_backend import RouterBackend
from baton.router.status.advice import Fleet, ServedRequest, advise, served_requests
from baton.router.workers.siblings import Siblings, merge
from baton.wire import EngineLoad

Status = dict[str, Any]
_UNKNOWN: Mapping[str, EngineLoad | None] = {}
_COUNTS = ("num_inflight", "queued_tokens")


async def deployment_status(backend: RouterBackend, siblings: Siblings | None = None) -> Status:
    async def load(engine: PooledEngine) -> EngineLoad | None:
        try:
            return await engine.client.load()
        except BatonError:
            return None

    engines = backend.pool.engines
    loads = await asyncio.gather(*(load(engine) for engine in engines))
    status = own_status(backend, dict(zip((engine.url for engine in engines), loads, strict=True)))
    for other in await siblings.statuses() if siblings is not None else ():
        status = _sum(status, other)
    status["advice"] = _advice(backend, status.pop("served"))
    return status


def own_status(backend: RouterBackend, loads: Mapping[str, EngineLoad | None] = _UNKNOWN) -> Status:
    """What this process knows, and the engines' `loads` by URL. `served`: its requests, for the advice."""
    engines = [(engine, loads.get(engine.url)) for engine in backend.pool.engines]
    views = [_view(engine, load) for engine, load in engines]
    faults = find_faults(views, backend.decisions.last(), backend.observer.recent, time.monotonic())
    faults += refused_pairs(backend.pool)
    acceptance = backend.observer.describe()
    return {
        "ready": backend.ready(),
        "alarms": [*acceptance["alarms"], *faults],
        "engines": [describe_engine(engine, load) for engine, load in engines],
        "handoffs": {
            "active": backend.num_active_handoffs,
            **{name: backend.handoffs[name] for name in backend.OUTCOMES},
            "failures": dict(backend.failures),
        },
        "decisions": backend.decisions.describe(),
        "hand_backs": backend.hand_backs.describe(),
        "recoveries": dict(backend.recovery.counts),
        "near_ties": backend.recovery.near_ties,
        "acceptance": acceptance,
        "served": served_requests(backend.observer.recent.ended()),
    }


def fault_counts(backend: RouterBackend) -> dict[str, int]:
    views = [_view(engine, None) for engine in backend.pool.engines]
    counts = count_faults(views, backend.decisions.last(), backend.observer.recent, time.monotonic())
    return {**counts, "refused_pairs": len(refused_pairs(backend.pool))}


def refused_pairs(pool: EnginePool) -> list[str]:
    return [
        f"engines {p.url} and {d.url} hand over nothing, so others compute prompts: {why}"
        for p, d, why in pool.pairs.refused(pool.engines)
    ]


def _view(engine: PooledEngine, load: EngineLoad | None) -> EngineView:
    usable = engine.healthy or engine.draining
    view = EngineView(engine.name, engine.url, engine.role, usable, engine.problem or "")
    if load is None:
        return view
    return dataclasses.replace(view, kv_usage=load.kv_usage, num_waiting=load.num_waiting)


def describe_engine(engine: PooledEngine, load: EngineLoad | None) -> Status:
    return {
        "url": engine.url,
        "role": engine.role,
        "healthy": engine.healthy,
        "draining": engine.draining,
        "problem": engine.problem,
        "overloaded": engine.overloaded,
        "num_inflight": engine.num_inflight,
        "queued_tokens": engine.queued_tokens,
        "info": engine.info,
        "load": load,
    }


def _sum(own: Status, other: Status) -> Status:
    status: Status = merge(own, other)
    theirs = {engine["url"]: engine for engine in other["engines"]}
    status["engines"] = [
        {**engine, **{name: engine[name] + theirs[engine["url"]][name] for name in _COUNTS}}
        if engine["url"] in theirs
        else engine
        for engine in own["engines"]
    ]
    status["served"] = [*own["served"], *msgspec.convert(other["served"], list[ServedRequest])]
    status["alarms"] = list(dict.fromkeys([*own["alarms"], *other["alarms"]]))
    return status


def _advice(backend: RouterBackend, served: list[ServedRequest]) -> Status | None:
    pool = backend.pool
    roles = [engine.role for engine in pool.usable(healthy=True)]
    decode, slots = roles.count("decode"), pool.max_num_seqs()
    fleet = Fleet(roles.count("prefill"), decode, slots // decode if slots and decode else None)
    advice = advise(served, fleet)
    return None if advice is None else advice.describe()

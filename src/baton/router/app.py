"""The router's aiohttp app: the OpenAI API, `/status`, and instances that join and leave at run time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Literal, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from baton.errors import BatonError, EngineUnavailableError, RequestError
from baton.openai import FrontMetrics, OpenAIService
from baton.openai.backend import KVMode
from baton.openai.http import add_openai_routes, json_response, new_app
from baton.openai.metrics import Row, RowCollector
from baton.router.backend import RouterBackend
from baton.router.client import new_session
from baton.router.pool import EnginePool, Instance, Policy, Role, baton_client
from baton.router.timers import RouterTimers
from baton.router.vllm_client import VllmClient
from baton.wire import EngineLoad, Recovery

EngineKind = Literal["baton", "vllm"]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a router starts. URLs are engines' base URLs; `tokenizer` None takes the engines' checkpoint. `engine`: what
    runs there, Baton's own engines or vLLM with `BatonConnector`."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    ticket_key: bytes | None = None
    kv_mode: KVMode = "push"
    allow_mode_override: bool = False
    policy: Policy = "round_robin"
    tokenizer: str | None = None
    recovery: Recovery = "full"
    timers: RouterTimers = RouterTimers()
    engine: EngineKind = "baton"


class _AddInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    role: Role


class _RemoveInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


T = TypeVar("T", _AddInstance, _RemoveInstance)


async def build_app(config: RouterConfig) -> web.Application:
    """Return the router's app. Engines that answer are known when this returns; others are asked again.

    Raises `RequestError` for a bad URL or role, `IncompatiblePeerError` when engines serve different models.
    """
    session = new_session()
    client = VllmClient if config.engine == "vllm" else baton_client
    pool = EnginePool(session, config.policy, config.tokenizer, config.timers, client)
    backend = RouterBackend(pool, config.ticket_key, config.kv_mode, config.allow_mode_override, config.recovery)
    roles: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("prefill", config.prefill),
        ("decode", config.decode),
        ("both", config.both),
    )
    try:
        for role, urls in roles:
            for url in urls:
                await pool.add(url, role)
    except BaseException:
        await session.close()
        raise
    metrics = FrontMetrics()
    metrics.registry.register(RowCollector(lambda: _rows(backend)))
    app = new_app(metrics)
    add_openai_routes(app, OpenAIService(backend, metrics))
    _add_router_routes(app, backend)
    app.cleanup_ctx.append(lambda _: _lifetime(session, backend))
    return app


async def _lifetime(session: aiohttp.ClientSession, backend: RouterBackend) -> AsyncIterator[None]:
    watcher = asyncio.create_task(backend.pool.watch())
    yield
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    await backend.close()
    await session.close()


def _add_router_routes(app: web.Application, backend: RouterBackend) -> None:
    pool = backend.pool

    async def health(request: web.Request) -> web.StreamResponse:
        if not backend.ready():
            raise EngineUnavailableError("no engine can take requests")
        return web.Response()

    async def status(request: web.Request) -> web.StreamResponse:
        return json_response(await _status(backend))

    async def add(request: web.Request) -> web.StreamResponse:
        asked = _body(await request.read(), _AddInstance)
        return json_response(_describe(await pool.add(asked.url, asked.role), None))

    async def remove(request: web.Request) -> web.StreamResponse:
        asked = _body(await request.read(), _RemoveInstance)
        return json_response(_describe(pool.remove(asked.url), None))

    app.router.add_get("/health", health)
    app.router.add_get("/status", status)
    app.router.add_post("/instances/add", add)
    app.router.add_post("/instances/remove", remove)


def _body(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is malformed: {error}") from None


async def _status(backend: RouterBackend) -> dict[str, object]:
    """Return engines, roles, load as of now, and handoffs."""

    async def load(instance: Instance) -> EngineLoad | None:
        try:
            return await instance.client.load()
        except BatonError:
            return None

    instances = backend.pool.instances
    loads = await asyncio.gather(*(load(instance) for instance in instances))
    return {
        "ready": backend.ready(),
        "engines": [_describe(i, now) for i, now in zip(instances, loads, strict=True)],
        "handoffs": {
            "active": backend.num_active_handoffs,
            **{name: backend.handoffs[name] for name in backend.OUTCOMES},
            "failures": dict(backend.failures),
        },
        "recoveries": dict(backend.recoveries),
    }


def _describe(instance: Instance, load: EngineLoad | None) -> dict[str, object]:
    return {
        "url": instance.url,
        "role": instance.role,
        "healthy": instance.healthy,
        "problem": instance.problem,
        "num_inflight": instance.num_inflight,
        "info": instance.info,
        "load": load,
    }


def _rows(backend: RouterBackend) -> Iterator[Row]:
    for outcome in backend.OUTCOMES:
        count = backend.handoffs[outcome]
        yield "baton:router_handoffs", "counter", "Handoffs by outcome.", {"outcome": outcome}, count
    for reason, count in sorted(backend.failures.items()):
        yield (
            "baton:router_handoff_failures",
            "counter",
            "Failed handoffs by reason.",
            {"reason": reason},
            count,
        )
    for rung, count in sorted(backend.recoveries.items()):
        yield "baton:router_recoveries", "counter", "Requests sent again, by rung.", {"rung": rung}, count
    yield "baton:router_handoffs_active", "gauge", "Handoffs that run.", {}, backend.num_active_handoffs
    for instance in backend.pool.instances:
        labels = {"url": instance.url, "role": instance.role}
        yield "baton:router_engine_up", "gauge", "Whether an engine takes requests.", labels, instance.healthy
        yield "baton:router_engine_inflight", "gauge", "Legs on an engine.", labels, instance.num_inflight

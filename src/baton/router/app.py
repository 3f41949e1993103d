"""The router's aiohttp app."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client.core import Metric

from baton.error_help import CODE_BY_ERROR
from baton.errors import REASONS, EngineUnavailableError, RequestError, reason_label
from baton.observe.tracing.tracer import Tracer, make_tracer
from baton.openai import FrontMetrics, OpenAIService
from baton.openai.api_routes import add_health, add_openai_routes
from baton.openai.http.app import BODIES, beside, json_response, new_app
from baton.openai.http.metrics import Row, RowCollector, counter, gauge
from baton.openai.http.waiting import AdmissionLimit
from baton.openai.records import report_throughput
from baton.router.admin import Admin
from baton.router.attempts.observer import RequestObserver
from baton.router.clients.engine_client import new_session
from baton.router.config.checks import new_connector
from baton.router.config.router_config import RouterConfig
from baton.router.connectors.base import Connector
from baton.router.dashboard_routes import add_dashboard
from baton.router.discovery import Discovery, read_services
from baton.router.hand_back import HandBacks
from baton.router.index.readers import EventReaders, read_sources
from baton.router.policies import PolicyConfig, create_policies
from baton.router.pool import EnginePool
from baton.router.router_backend import RouterBackend
from baton.router.routes import WHYS, Routes
from baton.router.scrape import Shared, deployment_metrics
from baton.router.status.deployment_status import deployment_status, describe_engine, fault_counts, own_status
from baton.router.workers.siblings import Change, Member, Siblings
from baton.text import Tokenizer
from baton.wire import RECOVERIES, Role

# Nats between two tokens. Summing 16-bit products in another order changes probabilities by up to 10 %.
DEFAULT_NEAR_TIE = 0.1
# Every code is exported from the start: Prometheus' rate() misses the first step of a counter that begins at 1.
_FAILURES = sorted({*REASONS, *CODE_BY_ERROR.values(), reason_label("")})


class _NewEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    role: Role


class _Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class _NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True): ...


T = TypeVar("T", _NewEngine, _Known, _NoParameters)


async def build_app(config: RouterConfig) -> web.Application:
    """Engines that do not answer yet are asked again later.

    Raises `ConfigError`, `RequestError` for a bad URL or role, `IncompatiblePeerError` if engines serve different
    models.
    """
    services = read_services(config.discover)
    connector = new_connector(config, services)
    number = None if config.worker is None else config.worker.number
    tracer = make_tracer(config.otlp_traces_endpoint, config.trace, config.trace_sampling_ratio, number)
    policies = create_policies(
        config.policy, config.prefill_policy, config.decode_policy, config.policy_config, random.Random()
    )
    readers = EventReaders(
        read_sources(config.kv_event_source, "kv_event_source"),
        read_sources(config.kv_event_replay_source, "kv_event_replay_source"),
    )
    session = new_session()
    pool = _new_pool(config, session, connector, policies.config, readers)
    hand_backs = HandBacks(connector, policies.config)
    near_tie = DEFAULT_NEAR_TIE if config.near_tie is None else config.near_tie
    backend = RouterBackend(
        pool,
        connector,
        config.kv_mode or "push",
        config.allow_mode_override,
        config.recovery,
        near_tie if config.engine == "vllm" else 0.0,  # Baton's engines never sample a token twice
        Routes(pool, policies, config.max_local_prefill_length if connector.computes_alone else 0, hand_backs),
        hand_backs,
    )
    metrics, siblings = FrontMetrics(), None if config.worker is None else Siblings(config.worker)
    try:
        await _add_engines(pool, config, siblings)
    except BaseException:
        await readers.close()
        await session.close()
        raise

    async def families() -> list[Metric]:
        own = metrics.registry.collect()
        return await deployment_metrics(own if siblings is None else await siblings.metrics(own), pool.engines)

    app = new_app(metrics, config.limits, config.access, families=Shared(families).get)
    backend.observer = RequestObserver(tracer, lambda: backend.model().name)
    service = OpenAIService(backend, metrics, config.max_queued_requests, config.parsing, config.per_request)
    add_openai_routes(app, service)
    metrics.registry.register(RowCollector(lambda: [*_rows(backend, service.queue), *backend.observer.rows()]))
    changes = _changes(pool)
    _add_router_routes(app, backend, Admin(config.admin_token, config.host_names), changes, siblings)
    if siblings is not None:
        app.cleanup_ctx.append(lambda _: _serve_siblings(siblings, metrics, backend, changes))
    app.cleanup_ctx.append(lambda _: _lifetime(session, backend, tracer))
    if services:
        discovery = Discovery(pool, services)
        app.cleanup_ctx.append(beside(discovery.run))
    app.cleanup_ctx.append(beside(lambda: report_throughput(metrics, lambda: _report(backend, service.queue))))
    return app


def _new_pool(
    config: RouterConfig,
    session: aiohttp.ClientSession,
    connector: Connector,
    policy: PolicyConfig,
    readers: EventReaders,
) -> EnginePool:
    load = config.load_tokenizer or functools.partial(
        Tokenizer.load,
        chat_template=config.chat_template,
        chat_template_content_format=config.chat_template_content_format,
    )
    veto = policy.is_overload if policy.has_veto else None
    loads = None if config.worker is None else config.worker.loads
    return EnginePool(session, connector.client, config.tokenizer, config.timers, load, veto, readers, loads)


async def _add_engines(pool: EnginePool, config: RouterConfig, siblings: Siblings | None) -> None:
    """Add the engines of another process of this router, which this one replaces or joins, else the configured ones."""
    members = None if siblings is None else await siblings.members()
    if members is not None:
        for member in members:
            await pool.add(member.url, member.role, known=True)
        return
    roles: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("prefill", config.prefill),
        ("decode", config.decode),
        ("both", config.both),
    )
    for role, urls in roles:
        for url in urls:
            await pool.add(url, role)


async def _lifetime(
    session: aiohttp.ClientSession, backend: RouterBackend, tracer: Tracer | None
) -> AsyncIterator[None]:
    watcher = asyncio.create_task(backend.pool.watch())
    yield
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    await backend.close()
    await session.close()
    if tracer is not None:
        await asyncio.to_thread(tracer.close)


async def _serve_siblings(
    siblings: Siblings, metrics: FrontMetrics, backend: RouterBackend, changes: dict[str, Change]
) -> AsyncIterator[None]:
    def members() -> list[Member]:
        staying = [engine for engine in backend.pool.engines if not engine.leaving]
        return [Member(engine.url, engine.role) for engine in sorted(staying, key=lambda one: one.problem is not None)]

    async with siblings.serving(metrics.registry.collect, lambda: own_status(backend), members, changes):
        yield


def _changes(pool: EnginePool) -> dict[str, Change]:
    """Changes of a pool, by the last part of a request's path."""

    async def add(body: bytes) -> object:
        new_engine = _decode(body, _NewEngine)
        return describe_engine(await pool.add(new_engine.url, new_engine.role), None)

    async def remove(body: bytes) -> object:
        return describe_engine(pool.remove(_decode(body, _Known).url), None)

    async def drain(body: bytes) -> object:
        return describe_engine(pool.drain(_decode(body, _Known).url), None)

    async def rebind(body: bytes) -> object:
        _decode(body, _NoParameters)
        await pool.rebind()
        return None

    return {"add": add, "remove": remove, "drain": drain, "rebind": rebind}


def _add_router_routes(
    app: web.Application,
    backend: RouterBackend,
    admin: Admin,
    changes: dict[str, Change],
    siblings: Siblings | None,
) -> None:
    shown = Shared(lambda: deployment_status(backend, siblings))

    async def health(request: web.Request) -> web.StreamResponse:
        """Whether requests are served."""
        if not backend.ready():
            raise EngineUnavailableError("no engine can take requests")
        return web.Response()

    async def status(request: web.Request) -> web.StreamResponse:
        """State of engines and handoffs."""
        return json_response(await shown.get())

    async def add(request: web.Request) -> web.StreamResponse:
        """Add an engine."""
        return await change(request, "add")

    async def remove(request: web.Request) -> web.StreamResponse:
        """Remove an engine. Its requests end on it."""
        return await change(request, "remove")

    async def rebind(request: web.Request) -> web.StreamResponse:
        """Let the next engine that answers decide which model is served."""
        await change(request, "rebind")
        return json_response(await deployment_status(backend, siblings))

    async def drain(request: web.Request) -> web.StreamResponse:
        """Remove an engine once its requests have ended."""
        return await change(request, "drain")

    async def change(request: web.Request, name: str) -> web.StreamResponse:
        admin.check(request)
        async with request.app[BODIES].read(request) as body:
            answer = json_response(await changes[name](body))
            if siblings is not None:
                await siblings.broadcast(name, body)
        return answer

    add_health(app, health)
    add_dashboard(app, backend, shown.get, admin.enabled)
    app.router.add_get("/status", status)
    app.router.add_post("/instances/add", add)
    app.router.add_post("/instances/remove", remove)
    app.router.add_post("/instances/drain", drain)
    app.router.add_post("/instances/rebind", rebind)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is malformed: {error}") from None


def _report(backend: RouterBackend, queue: AdmissionLimit) -> str:
    return f", waiting {queue.num_waiting}; {backend.decisions.summary()}"


def _rows(backend: RouterBackend, queue: AdmissionLimit) -> Iterator[Row]:
    yield gauge("router_requests_waiting", "Choices without a token yet.", queue.num_waiting)
    for outcome in backend.OUTCOMES:
        yield counter("router_handoffs", "Handoffs by outcome.", backend.handoffs[outcome], outcome=outcome)
    for reason in _FAILURES:
        yield counter("router_handoff_failures", "Failed handoffs by reason.", backend.failures[reason], reason=reason)
    for why in WHYS:
        yield counter(
            "router_decisions", "Attempts by where they ran, and why.", backend.decisions.counts[why], why=why
        )
    text = "Requests that an engine declined, since it lacked more of their prompt than was thought."
    yield counter("router_stale_prefixes", text, backend.decisions.stale)
    for rung in RECOVERIES[1:]:
        yield counter("router_recoveries", "Requests sent again, by rung.", backend.recovery.counts[rung], rung=rung)
    for kind, count in fault_counts(backend).items():
        yield gauge("router_alarms", "Alarms in /status that hold now, by kind.", count, kind=kind)
    yield from backend.hand_backs.rows()
    yield from backend.concurrency.rows()
    yield counter("router_near_ties", "First tokens that differed by a near-tie.", backend.recovery.near_ties)
    yield gauge("router_handoffs_active", "Handoffs that run.", backend.num_active_handoffs)
    for engine in backend.pool.engines:
        labels: dict[str, str] = {"url": engine.url, "role": engine.role}
        yield gauge("router_engine_up", "Whether an engine takes requests.", engine.healthy, **labels)
        yield gauge("router_engine_draining", "Whether an engine is about to leave.", engine.draining, **labels)
        yield gauge("router_engine_inflight", "Legs on an engine.", engine.num_inflight, **labels)
        text = "Prompt tokens of this router's requests that an engine has yet to compute."
        yield gauge("router_engine_queued_tokens", text, engine.queued_tokens, **labels)
        if (subscriber := backend.pool.readers.subscribers.get(engine.url)) is not None:
            text = "Blocks that an engine holds, by its KV events."
            yield gauge("router_engine_kv_blocks", text, subscriber.index.num_blocks, **labels)
            text = "Gaps in an engine's KV events after which the router forgot its blocks."
            yield counter("router_engine_kv_event_gaps", text, subscriber.sequence.num_gaps, **labels)
        text = "Whether an engine gets no new requests because of its load."
        yield gauge("router_engine_overloaded", text, engine.overloaded, **labels)

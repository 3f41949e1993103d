"""`baton serve` and `baton up`. Slow imports come after cheap checks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from baton import event_loop
from baton.cli.flag_sources import named_after_source
from baton.cli.logs import log_lines, log_to_stderr, logger, pass_on
from baton.cli.options import (
    AdminOptions,
    EngineOptions,
    ListenOptions,
    ModelArgument,
    ProcessOptions,
    router_config,
    to_flags,
    with_options,
)
from baton.cli.roles import RoleOptions
from baton.cli.router import serve_router
from baton.cli.supervision import DEFAULT_MAX_RESTARTS, Supervisor
from baton.deployment import Deployment, Reporter
from baton.engine.config import MAX_ENGINES, EngineConfig, SpeculativeConfig
from baton.engine.memory.sizes import check_sizes
from baton.engine.ports import check_ports, warn_if_loopback
from baton.errors import CheckpointError, ConfigError, EngineUnavailableError
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import KeyRing
from baton.imports import without_gc
from baton.router.config.router_settings import RoutingSettings
from baton.text import Tokenizer
from baton.wire import Role

# Longer than a decode engine's local prefill limit, so that the first request is handed off.
_QUESTION = (
    "I want to travel through Europe by train this summer. My journey begins in Berlin, and I would like to see three "
    "more cities, each of them the capital of another country, where the food is good, the museums are large and the "
    "evenings are warm. Which three capitals should I visit, in which order, and what is the best thing to see in each?"
)


@with_options
def serve_command(
    options: EngineOptions,
    listen: ListenOptions,
    process: ProcessOptions,
    model: ModelArgument,
    role: Annotated[Role, typer.Option(help="both serves the API; prefill and decode serve a router.")] = "both",
    engine_id: Annotated[
        str | None, typer.Option(help="Name among engines and in keys; default: role and port.")
    ] = None,
) -> None:
    """Serve one engine with the OpenAI API."""
    began = time.monotonic()
    with Reporter(process.ready_fd, log_lines) as reporter:
        listen.check_role(role)
        access, parsing, template = listen.access(), listen.parsing(), listen.template()
        if options.data_parallel_size > 1 and process.data_parallel_rank is None:
            return _serve_ranks(options, listen, process, model, role, engine_id, reporter)
        listener = listen.bind()
        with contextlib.closing(listener):
            name = f"{role}-{listener.getsockname()[1]}" if engine_id is None else engine_id
            config = options.to_config(model, role, name, process)
            check_files(config)
            _check(config)
            warn_if_loopback(config, listen.host)
            tokenizer = Tokenizer.load(config.model, **template)
            reporter.progress("loading libraries")
            with without_gc():
                from baton.engine.async_engine import AsyncEngine
                from baton.server.app import build_app
                from baton.server.run import run_engine

            def on_ready(engine: AsyncEngine, url: str) -> None:
                kv = f"{engine.info.kv_tokens} tokens of KV in pages of {config.block_size}"
                reporter.ready(url, kv)
                if process.ready_fd is None:
                    log_lines(_banner(config, {name: kv}, url if role == "both" else None))
                    took = f"started in {time.monotonic() - began:.1f} s"
                    log_lines(f"{engine.info.model} ({role}) is served at {url}/v1   ({took})")

            def make_engine() -> AsyncEngine:
                return AsyncEngine(config, reporter.progress, tokenizer)

            make_app = functools.partial(
                build_app,
                tokenizer=tokenizer,
                limits=listen.limits(),
                access=access,
                parsing=parsing,
                per_request=listen.per_request(),
            )
            run_engine(make_engine, make_app, listener, on_ready, listen.shutdown_timeout)
            reporter.signalled()


def check_files(config: EngineConfig) -> None:
    """Raises `ConfigError`, `CheckpointError`."""
    if not (Path(config.model) / "config.json").exists():
        raise CheckpointError(f"model: {config.model} has no config.json")
    if config.keys is not None:
        KeyRing(config.keys, config.engine_id)
    if config.ticket_key_path is not None:
        load_or_create_key(config.ticket_key_path)


def _serve_ranks(
    options: EngineOptions,
    listen: ListenOptions,
    process: ProcessOptions,
    model: str,
    role: Role,
    engine_id: str | None,
    reporter: Reporter,
) -> None:
    from baton.cli.data_ranks import DataRanks, free_ports

    log_to_stderr(listen.log_level, listen.log_format)
    # For one error line instead of one per rank.
    size = options.data_parallel_size
    check_sizes(options.to_config(model, role, role if engine_id is None else engine_id, process), size)
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(free_ports(listen.host, listen.port, size))
        name = f"{role}-{ports[0]}" if engine_id is None else engine_id
        ranks = stack.enter_context(contextlib.closing(DataRanks(size, name, ports, options.engines_per_host or 1)))
        stack.enter_context(ranks.forwarding_signals())
        urls, kv = ranks.await_ready(reporter)
        reporter.ready(urls[0], kv, urls)
        if process.ready_fd is None:
            log_lines(f"{size} data-parallel ranks ({role}) are served at {', '.join(urls)}")
        ranks.wait()
        reporter.signalled()


def _check(config: EngineConfig, num_engines: int = 1) -> None:
    check_sizes(config, num_engines)
    check_ports(config, num_engines)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines.")] = 1
    decode: Annotated[int, typer.Option(min=1, help="Decode engines.")] = 1
    engine_port_base: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the first engine; the others use the next ones. 0: free ports."),
    ] = 0
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often in a row an engine that ended by itself is started again.")
    ] = DEFAULT_MAX_RESTARTS

    def num_engines(self, ranks: Mapping[str, int], router_port: int) -> int:
        """Raises `ConfigError`."""
        num, base = self.prefill * ranks["prefill"] + self.decode * ranks["decode"], self.engine_port_base
        if num > MAX_ENGINES:
            what = f"{self.prefill}, with decode {self.decode}, makes {num} engines; at most {MAX_ENGINES}"
            raise ConfigError("prefill" if self.prefill >= self.decode else "decode", what)
        if base and base <= router_port < base + num:
            raise ConfigError("engine_port_base", f"{base} gives an engine the router's port {router_port}")
        return num

    def named(self, error: ConfigError) -> ConfigError:
        chosen = error.field == "port" and self.engine_port_base
        return ConfigError("engine_port_base", error.message) if chosen else error


def _check_fleet(config: EngineConfig, routing: RoutingSettings, roles: RoleOptions, num_engines: int) -> None:
    """One error line, not one per engine. Raises `ConfigError`."""
    if routing.policy_config.hand_back and not config.enable_prefix_caching:
        raise ConfigError("policy_config", "hand_back needs prefix caching, which is off")
    check_files(config)
    _check(config, num_engines)
    roles.check(config)


@with_options
def up_command(
    context: typer.Context,
    fleet: FleetOptions,
    options: EngineOptions,
    listen: ListenOptions,
    routing: RoutingSettings,
    admin: AdminOptions,
    roles: RoleOptions,
    model: ModelArgument,
) -> None:
    """A whole P/D deployment on this host: engines as child processes, the router here."""
    from baton.router.config.checks import check_routing
    from baton.server.run import ending_on_sigterm

    began = time.monotonic()
    own = {"recovery": options.recovery, "max_queued_requests": options.max_queued_requests, **listen.answers()}
    listener = listen.bind()
    with contextlib.closing(listener), ending_on_sigterm():
        options = roles.alike(options, options.batch_invariant)
        config = options.to_config(model)
        ranks = roles.data_ranks(options)
        _check_fleet(config, routing, roles, fleet.num_engines(ranks, listener.getsockname()[1]))
        router = router_config(routing, admin, listen.host, tokenizer=config.model, **own)
        check_routing(router)
        log_lines(f"starting {fleet.prefill} prefill and {fleet.decode} decode engines of {model}")
        load_tokenizer = loading_ahead(config.model, listen.template())
        deployment = Deployment(
            config.model,
            fleet.prefill,
            fleet.decode,
            engine_flags=to_flags(options.located(config)),
            role_flags=roles.flags(),
            kv_transport=config.kv_transfer_config.kv_transport,
            router=False,
            on_progress=log_lines,
            forward=pass_on,
            log_format=listen.log_format,
            shutdown_timeout_s=listen.shutdown_timeout,
            engine_port_base=fleet.engine_port_base,
            data_ranks=ranks,
            named=lambda role, error: named_after_source(context, roles.named(role, fleet.named(error))),
        )
        with deployment:
            key = load_or_create_key(deployment.ticket_key_file)
            roled = {role: tuple(getattr(deployment, f"{role}_urls")) for role in ("prefill", "decode", "both")}
            router = replace(router, ticket_key=key, load_tokenizer=load_tokenizer, **roled)  # type: ignore[arg-type]

            def on_ready(url: str) -> None:
                took = f"started in {time.monotonic() - began:.1f} s"
                log_lines(_banner(config, deployment.engines(), url))
                log_lines(f"ready: {url}/v1   (status: {url}/status, {took}, Ctrl-C ends all)")

            supervisor, stop = Supervisor(deployment, logger.warning, fleet.max_restarts), asyncio.Event()
            watch = functools.partial(_supervise, supervisor, stop)
            event_loop.run(serve_router(router, listener, on_ready, watch, listen.shutdown_timeout, stop))
            log_lines("ending all processes")
        if supervisor.failure is not None:
            raise EngineUnavailableError(supervisor.failure)


def loading_ahead(directory: str, template: Mapping[str, Any]) -> Callable[[str], Tokenizer]:
    """`Tokenizer.load`, whose first result a thread loads meanwhile."""
    load: Callable[[str], Tokenizer] = functools.partial(Tokenizer.load, skip_vocabulary=False, **template)
    ahead = {directory: ThreadPoolExecutor(1).submit(load, directory)}

    def loaded(wanted: str) -> Tokenizer:
        first = ahead.pop(wanted, None)
        return load(wanted) if first is None else first.result()

    return loaded


def _drafts(spec: SpeculativeConfig) -> str:
    k = spec.num_speculative_tokens
    return f"up to {spec.max_drafts} drafts" if k == "auto" else f"{k} drafts"


def _banner(config: EngineConfig, engines: Mapping[str, str], url: str | None) -> str:
    spec, name = config.speculative_config, config.served_model_name or Path(config.model).name
    lines = {"model": f"{name} ({config.model})", "drafter": "none", **engines}
    if spec is not None:
        source = spec.model or "no checkpoint of its own"
        lines["drafter"] = f"{spec.method} ({source}), {_drafts(spec)} a round"
    if defaults := config.sampling_defaults().describe():
        lines["sampling"] = f"{defaults}, where a request does not say"
    if url is not None:
        ask = {"model": name, "temperature": 0, "max_tokens": 128, "messages": [{"role": "user", "content": _QUESTION}]}
        body = json.dumps(ask)
        json_header = "-H 'content-type: application/json'"
        lines["try"] = f"curl -s {url}/v1/chat/completions {json_header} -d {shlex.quote(body)}"
    return "\n".join(f"{label:<10} {text}" for label, text in lines.items())


async def _supervise(supervisor: Supervisor, stop: asyncio.Event) -> None:
    while supervisor.failure is None:
        try:
            supervisor.poll()
        except OSError as error:  # no memory for a process; the next check counts its end
            logger.error("an engine could not be started again: %s", error)
        await asyncio.sleep(0.5)
    stop.set()

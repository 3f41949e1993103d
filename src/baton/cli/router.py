"""`baton router`, and how a router is served."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton import event_loop
from baton.cli.logs import log_lines
from baton.cli.options import AdminOptions, ListenOptions, ProcessOptions, router_config, with_options
from baton.deployment import Reporter
from baton.directories import RunDirectory
from baton.errors import ConfigError
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import ticket_key_file
from baton.kernels.huge_pages import move_heap
from baton.openai.http.app import beside
from baton.openai.http.serving import SHUTDOWN_TIMEOUT_S, serve, url_of
from baton.router.config.router_settings import RouterSettings

if TYPE_CHECKING:
    from baton.router.config.router_config import RouterConfig

_Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="Engine's URL; repeat, or separate by commas.")]
_YOUNG_OBJECTS = 10_000
_VLLM_ONLY = ("kv_connector", "seed_first_token", "near_tie")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions(RouterSettings):
    prefill: _Urls = None
    decode: _Urls = None
    both: _Urls = None
    discover: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=HOST:PORT", help="Each address of this DNS name is an engine. Repeat."),
    ] = None
    kv_event_source: Annotated[
        list[str] | None,
        typer.Option(metavar="URL=ENDPOINT", help="Where a vLLM or SGLang server publishes its KV events. Repeat."),
    ] = None
    kv_event_replay_source: Annotated[
        list[str] | None, typer.Option(metavar="URL=ENDPOINT", help="Where it replays them. Repeat.")
    ] = None

    def sources(self) -> dict[str, tuple[str, ...]]:
        return {
            "discover": tuple(self.discover or ()),
            "kv_event_source": tuple(self.kv_event_source or ()),
            "kv_event_replay_source": tuple(self.kv_event_replay_source or ()),
        }


@with_options
def router_command(options: FrontOptions, listen: ListenOptions, process: ProcessOptions, admin: AdminOptions) -> None:
    """The server for clients over engines that run already; more may join by POST /instances/add."""
    for name in _VLLM_ONLY:
        value = getattr(options, name)
        if options.engine != "vllm" and value is not None and value is not False:
            raise ConfigError(name, "is for --engine vllm")
    with Reporter(process.ready_fd, log_lines) as reporter:
        key_file = process.ticket_key_file
        if key_file is None and process.keys is not None:
            key_file = str(ticket_key_file(process.keys))
        urls = {role: _split(getattr(options, role)) for role in ("prefill", "decode", "both")}
        key = load_or_create_key(key_file) if key_file else None
        more = {**listen.answers(), **urls, **options.sources()}
        config = router_config(options, admin, listen.host, ticket_key=key, **more)
        from baton.router.config.checks import check_config

        check_config(config)
        listeners = listen.bind_shared(options.workers)

        def on_ready(url: str) -> None:
            reporter.ready(url)
            if process.ready_fd is None and (any(urls.values()) or options.discover):
                log_lines(f"router is served at {url}/v1")
            elif process.ready_fd is None:
                log_lines(f"router waits for engines: POST {url}/instances/add")

        with contextlib.ExitStack() as undo:
            for listener in listeners:
                undo.enter_context(contextlib.closing(listener))
            if options.workers == 1:
                event_loop.run(serve_router(config, listener, on_ready, shutdown_timeout_s=listen.shutdown_timeout))
            else:
                _run_workers(config, listeners, on_ready, listen.shutdown_timeout)
        reporter.signalled()


def _run_workers(
    config: RouterConfig, listeners: Sequence[socket.socket], on_ready: Callable[[str], None], shutdown_timeout_s: float
) -> None:
    """Serve as one process per listener. Raises `BatonError`."""
    from baton.router.workers.loads import LoadTable, RouterProcess, WorkerLoads
    from baton.router.workers.worker_processes import WorkerProcesses

    table = LoadTable(len(listeners))
    with contextlib.closing(RunDirectory("router-")) as directory:

        def run_worker(number: int, alive: Callable[[], None]) -> None:
            worker = RouterProcess(number, len(listeners), directory.path, WorkerLoads(table, number))
            own = dataclasses.replace(config, worker=worker)
            for other, listener in enumerate(listeners):
                if other != number:
                    listener.close()  # or this process would get connections that it never accepts
            begin = functools.partial(_each_second, alive)
            event_loop.run(serve_router(own, listeners[number], begin, shutdown_timeout_s=shutdown_timeout_s))

        def close_all() -> None:
            for listener in listeners:
                listener.close()

        scheme = "http" if config.access.tls() is None else "https"
        url = f"{scheme}:{url_of(listeners[0]).partition(':')[2]}"
        WorkerProcesses(len(listeners), run_worker, table.clear, close_all).run(lambda: on_ready(url))


def _each_second(call: Callable[[], None], url: str) -> None:
    call()
    asyncio.get_running_loop().call_later(1.0, _each_second, call, url)


async def serve_router(
    config: RouterConfig,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
    stop: asyncio.Event | None = None,
) -> None:
    """See `openai.http.serving.serve`. `watch`: runs meanwhile."""
    from baton.router import build_app

    app = await build_app(config)
    # A collection that visits modules stops all streams for 20 ms.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    move_heap()
    if watch is not None:
        app.cleanup_ctx.append(beside(watch))
    await serve(app, listener, lambda: on_ready(url_of(listener, app)), stop, shutdown_timeout_s)


def _split(urls: list[str] | None) -> tuple[str, ...]:
    return tuple(part for url in urls or [] for part in url.split(",") if part)

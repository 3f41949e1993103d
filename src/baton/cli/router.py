"""`baton router`, and how a router is served. Slow imports come late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli.logs import tell
from baton.cli.options import ListenOptions, ProcessOptions, RouterOptions, with_options
from baton.deployment import Reporter
from baton.errors import ConfigError
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, TICKET_LIFE_S, load_or_create_key
from baton.handoff.session.keys import ticket_key_file
from baton.openai.http.serving import SHUTDOWN_TIMEOUT_S, serve, url_of
from baton.waiting import MAX_QUEUED_REQUESTS
from baton.wire import Recovery

if TYPE_CHECKING:
    from aiohttp import web

    from baton.router import RouterConfig

_Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="Repeat, or separate by commas.")]
_VLLM_ONLY = ("kv_connector", "seed_first_token", "near_tie")


@dataclass(frozen=True, slots=True)
class FrontOptions(RouterOptions):
    """Field names are those of `RouterConfig`."""

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
        list[str] | None, typer.Option(metavar="URL=ENDPOINT", help="Where it repeats them. Repeat.")
    ] = None
    tokenizer: Annotated[str | None, typer.Option(help="Default: the engines' own checkpoint.")] = None
    recovery: Annotated[Recovery, typer.Option(help="How far the router goes for a request whose engines failed.")] = (
        "full"
    )
    engine: Annotated[
        Literal["baton", "vllm", "sglang"],
        typer.Option(help="What runs at the URLs: `baton serve`, vLLM, or SGLang."),
    ] = "baton"
    kv_connector: Annotated[
        str | None,
        typer.Option(help="vLLM: BatonConnector (default), or its own NixlConnector (pull) or NixlPushConnector."),
    ] = None
    seed_first_token: Annotated[
        bool,
        typer.Option("--seed-first-token", help="vLLM: the decode server is sent the first token, and samples none."),
    ] = False
    near_tie: Annotated[
        float | None,
        typer.Option(min=0.0, help="vLLM: nats by which two first tokens may be apart. Default: 0.1; 0 excuses none."),
    ] = None
    ticket_life: Annotated[
        float,
        typer.Option(
            min=1, max=MAX_TICKET_LIFE_S, help="Seconds in which both legs reach their engines; they may wait."
        ),
    ] = TICKET_LIFE_S
    max_queued_requests: Annotated[
        int, typer.Option(min=1, help="Choices that may wait for their first token; more get 429.")
    ] = MAX_QUEUED_REQUESTS

    def event_sources(self) -> dict[str, tuple[str, ...]]:
        return {
            "kv_event_source": tuple(self.kv_event_source or ()),
            "kv_event_replay_source": tuple(self.kv_event_replay_source or ()),
        }


@with_options
def router_command(options: FrontOptions, listen: ListenOptions, process: ProcessOptions) -> None:
    """The front door over engines that run already; more may join by POST /instances/add."""
    for name in _VLLM_ONLY:
        value = getattr(options, name)
        if options.engine != "vllm" and value is not None and value is not False:
            raise ConfigError(name, "is for --engine vllm")
    with Reporter(process.ready_fd, tell) as reporter:
        key_file = process.ticket_key_file
        if key_file is None and process.keys is not None:
            key_file = str(ticket_key_file(process.keys))
        urls = {role: _split(getattr(options, role)) for role in ("prefill", "decode", "both")}
        key = load_or_create_key(key_file) if key_file else None
        found = {"discover": tuple(options.discover or ()), **options.event_sources()}
        config = options.to_config(listen.host, ticket_key=key, **listen.answers(), **urls, **found)
        listener = listen.bind()

        def on_ready(url: str) -> None:
            reporter.ready(url)
            if process.ready_fd is None and (any(urls.values()) or options.discover):
                tell(f"router is served at {url}/v1")
            elif process.ready_fd is None:
                tell(f"router waits for engines: POST {url}/instances/add")

        with contextlib.closing(listener):
            asyncio.run(serve_router(config, listener, on_ready, shutdown_timeout_s=listen.shutdown_timeout))
        reporter.signalled()


async def serve_router(
    config: RouterConfig,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    beside: Callable[[web.Application], AsyncIterator[None]] | None = None,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
    stop: asyncio.Event | None = None,
) -> None:
    """As `baton.openai.http.serving.serve`, with `beside` as a cleanup context of the app."""
    from baton.router import build_app

    app = await build_app(config)

    if beside is not None:
        app.cleanup_ctx.append(beside)
    await serve(app, listener, lambda: on_ready(url_of(listener, app)), stop, shutdown_timeout_s)


def _split(urls: list[str] | None) -> tuple[str, ...]:
    return tuple(part for url in urls or [] for part in url.split(",") if part)

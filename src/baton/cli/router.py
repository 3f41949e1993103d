"""`baton router`, and how a router is served. Heavy imports wait until they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton.deployment import Reporter
from baton.errors import ConfigError
from baton.handoff.protocol.ticket import MAX_TICKET_LIFE_S, TICKET_LIFE_S
from baton.openai.serving import SHUTDOWN_TIMEOUT_S, bind, serve, url_of
from baton.waiting import MAX_QUEUED_REQUESTS
from baton.wire import Mode, Recovery

if TYPE_CHECKING:
    from aiohttp import web

    from baton.router import RouterConfig

Host = Annotated[str, typer.Option(help="Address to listen on; loopback unless you protect it yourself.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
ShutdownTimeout = Annotated[
    float, typer.Option(min=0.0, help="Seconds that requests have to end after SIGTERM; then they end in an error.")
]
AdminTokenFile = Annotated[
    str | None,
    typer.Option(help="Token for POST /instances/..., made where there is none. Default: BATON_ADMIN_TOKEN."),
]
ReadyFd = Annotated[int | None, typer.Option(hidden=True)]
KeyFile = Annotated[str | None, typer.Option(help="32 random bytes shared by router and engines.")]
Keys = Annotated[str | None, typer.Option(metavar="DIR", help="Key directory of `baton keys`, ticket key included.")]
KvMode = Annotated[Mode, typer.Option(help="Who issues the copies: prefill (push) or decode (pull).")]
Policy = Annotated[Literal["round_robin", "least_loaded"], typer.Option(help="How engines are chosen.")]
AllowMode = Annotated[bool, typer.Option(help="Let a request choose by its field kv_mode.")]
_KvMode = Annotated[Mode | None, typer.Option(help="Who issues the copies: prefill (push, default) or decode (pull).")]
_TokenizerDir = Annotated[str | None, typer.Option(help="Default: the engines' own checkpoint.")]
_LastRung = Annotated[Recovery, typer.Option(help="How far the router goes for a request whose engines failed.")]
_EngineKind = Annotated[Literal["baton", "vllm"], typer.Option(help="What runs at the URLs: `baton serve`, or vLLM.")]
_Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="Repeat, or separate by commas.")]
_KvConnector = Annotated[
    str | None,
    typer.Option(help="vLLM: BatonConnector (default), or its own NixlConnector (pull) or NixlPushConnector."),
]
_Seed = Annotated[
    bool, typer.Option("--seed-first-token", help="vLLM: the decode server is sent the first token, and samples none.")
]
_TicketLife = Annotated[
    float,
    typer.Option(min=1, max=MAX_TICKET_LIFE_S, help="Seconds in which both legs reach their engines; they may wait."),
]
_NearTie = Annotated[
    float | None,
    typer.Option(min=0.0, help="vLLM: nats by which two first tokens may be apart. Default: 0.1; 0 excuses none."),
]


_MaxQueued = Annotated[int, typer.Option(min=1, help="Choices that may wait for their first token; more get 429.")]


def router_command(
    prefill: _Urls = None,
    decode: _Urls = None,
    both: _Urls = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    ticket_key_file: KeyFile = None,
    keys: Keys = None,
    kv_mode: _KvMode = None,
    policy: Policy = "round_robin",
    allow_mode_override: AllowMode = False,
    tokenizer: _TokenizerDir = None,
    recovery: _LastRung = "full",
    engine: _EngineKind = "baton",
    kv_connector: _KvConnector = None,
    seed_first_token: _Seed = False,
    near_tie: _NearTie = None,
    ticket_life: _TicketLife = TICKET_LIFE_S,
    shutdown_timeout: ShutdownTimeout = SHUTDOWN_TIMEOUT_S,
    admin_token_file: AdminTokenFile = None,
    max_queued_requests: _MaxQueued = MAX_QUEUED_REQUESTS,
    ready_fd: ReadyFd = None,
) -> None:
    """The front door over engines that run already; more may join by POST /instances/add."""
    from baton.handoff.channel import keys as key_files
    from baton.handoff.protocol.ticket import load_or_create_key
    from baton.router import RouterConfig
    from baton.router.admin import admin_token

    vllm_only: dict[str, Any] = {
        "kv_connector": kv_connector,
        "seed_first_token": seed_first_token or None,
        "near_tie": near_tie,
    }
    vllm_only = {name: value for name, value in vllm_only.items() if value is not None}
    if vllm_only and engine != "vllm":
        raise ConfigError(next(iter(vllm_only)), "is for --engine vllm")
    reporter = Reporter(ready_fd)
    if ticket_key_file is None and keys is not None:
        ticket_key_file = str(key_files.ticket_key_file(keys))
    config = RouterConfig(
        prefill=_split(prefill),
        decode=_split(decode),
        both=_split(both),
        ticket_key=load_or_create_key(ticket_key_file) if ticket_key_file else None,
        kv_mode=kv_mode,
        policy=policy,
        allow_mode_override=allow_mode_override,
        tokenizer=tokenizer,
        recovery=recovery,
        engine=engine,
        admin_token=admin_token(admin_token_file),
        max_queued_requests=max_queued_requests,
        host_names=(host,),
        ticket_life=ticket_life,
        **vllm_only,
    )
    listener = bind(host, port)

    def on_ready(url: str) -> None:
        reporter.ready(url)
        if ready_fd is None:
            print(f"router is served at {url}/v1", file=sys.stderr, flush=True)

    with contextlib.closing(listener):
        asyncio.run(serve_router(config, listener, on_ready, shutdown_timeout_s=shutdown_timeout))


async def serve_router(
    config: RouterConfig,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    beside: Callable[[web.Application], AsyncIterator[None]] | None = None,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
) -> None:
    """Serve a router until SIGINT or SIGTERM; what `beside` starts runs meanwhile. See `baton.openai.serving.serve`."""
    from baton.router import build_app

    app = await build_app(config)
    if beside is not None:
        app.cleanup_ctx.append(beside)
    await serve(app, listener, lambda: on_ready(url_of(listener)), None, shutdown_timeout_s)


def _split(urls: list[str] | None) -> tuple[str, ...]:
    return tuple(part for url in urls or [] for part in url.split(",") if part)

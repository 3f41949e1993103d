"""`baton serve`, `baton router` and `baton up`. Heavy imports wait until the port is known to be free."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli_options import EngineOptions, with_engine_options
from baton.engine.config import KVMode, Role
from baton.errors import ConfigError
from baton.openai.http import bind, serve, url_of
from baton.processes import Deployment, Reporter
from baton.wire import Recovery

if TYPE_CHECKING:
    from baton.router import RouterConfig

Host = Annotated[str, typer.Option(help="Address to listen on; loopback unless you protect it yourself.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
ReadyFd = Annotated[int | None, typer.Option(hidden=True)]
KeyFile = Annotated[str | None, typer.Option(help="32 random bytes shared by router and engines.")]
Keys = Annotated[str | None, typer.Option(metavar="DIR", help="Key directory of `baton keys`, ticket key included.")]
KvMode = Annotated[KVMode, typer.Option(help="Who issues the copies: prefill (push) or decode (pull).")]
Policy = Annotated[Literal["round_robin", "least_loaded"], typer.Option(help="How engines are chosen.")]
AllowMode = Annotated[bool, typer.Option(help="Let a request choose by its field kv_mode.")]
TokenizerDir = Annotated[str | None, typer.Option(help="Default: the engines' own checkpoint.")]
LastRung = Annotated[Recovery, typer.Option(help="How far the router goes for a request whose engines failed.")]
EngineKind = Annotated[Literal["baton", "vllm"], typer.Option(help="What runs at the URLs: `baton serve`, or vLLM.")]
EngineUrls = Annotated[list[str] | None, typer.Option(metavar="URL", help="Repeat, or separate by commas.")]


@with_engine_options
def serve_command(
    options: EngineOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint directory in Hugging Face format.")],
    role: Annotated[Role, typer.Option(help="both serves the API; prefill and decode serve a router.")] = "both",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    ticket_key_file: KeyFile = None,
    keys: Keys = None,
    engine_id: Annotated[str | None, typer.Option(help="Default: role and port.")] = None,
    ready_fd: ReadyFd = None,
) -> None:
    """Serve one engine with the OpenAI API."""
    reporter = Reporter(ready_fd)
    listener = bind(host, port)
    with contextlib.closing(listener):
        name = engine_id or f"{role}-{listener.getsockname()[1]}"
        config = options.to_config(model, role, name, ticket_key_file, keys)
        from baton.text import Tokenizer

        tokenizer = Tokenizer.load(model)
        reporter.progress("loading libraries")
        from baton.engine.async_engine import AsyncEngine
        from baton.server.app import Engine
        from baton.server.run import run_engine

        def on_ready(engine: Engine, url: str) -> None:
            reporter.ready(url)
            if ready_fd is None:
                print(f"{engine.info.model} ({role}) is served at {url}/v1", file=sys.stderr, flush=True)

        run_engine(lambda: AsyncEngine(config, reporter.progress), tokenizer, listener, on_ready)


def router_command(
    prefill: EngineUrls = None,
    decode: EngineUrls = None,
    both: EngineUrls = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    ticket_key_file: KeyFile = None,
    keys: Keys = None,
    kv_mode: KvMode = "push",
    policy: Policy = "round_robin",
    allow_mode_override: AllowMode = False,
    tokenizer: TokenizerDir = None,
    recovery: LastRung = "full",
    engine: EngineKind = "baton",
    ready_fd: ReadyFd = None,
) -> None:
    """The front door over engines that run already; more may join by POST /instances/add."""
    from baton.handoff import keys as key_files

    reporter = Reporter(ready_fd)
    if ticket_key_file is None and keys is not None:
        ticket_key_file = str(key_files.ticket_key_file(keys))
    config = _router_config(
        _split(prefill),
        _split(decode),
        _split(both),
        ticket_key_file,
        kv_mode,
        policy,
        allow_mode_override,
        tokenizer,
        recovery,
        engine,
    )
    listener = bind(host, port)

    def on_ready(url: str) -> None:
        reporter.ready(url)
        if ready_fd is None:
            print(f"router is served at {url}/v1", file=sys.stderr, flush=True)

    with contextlib.closing(listener):
        asyncio.run(_serve_router(config, listener, on_ready))


@with_engine_options
def up_command(
    options: EngineOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint directory in Hugging Face format.")],
    prefill: Annotated[int, typer.Option(min=0, help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode engines.")] = 1,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    kv_mode: KvMode = "push",
    policy: Policy = "round_robin",
    allow_mode_override: AllowMode = False,
) -> None:
    """A whole P/D deployment on this host: engines as child processes, the router here."""
    from baton.server.run import ending_on_sigterm

    listener = bind(host, port)
    with contextlib.closing(listener), ending_on_sigterm():
        # Checked here too, so that a bad flag is one line instead of one per engine.
        options.to_config(model)
        print(f"starting {prefill} prefill and {decode} decode engines of {model}", file=sys.stderr, flush=True)
        deployment = Deployment(
            model, prefill, decode, engine_flags=options.to_flags(), router=False, show_progress=True
        )
        with deployment:
            config = _router_config(
                deployment.prefill_urls,
                deployment.decode_urls,
                deployment.both_urls,
                deployment.ticket_key_file,
                kv_mode,
                policy,
                allow_mode_override,
                model,
                options.recovery,
            )

            def on_ready(url: str) -> None:
                print(f"ready: {url}/v1   (status: {url}/status, Ctrl-C ends all)", file=sys.stderr, flush=True)

            asyncio.run(_serve_router(config, listener, on_ready, deployment))
            print("ending all processes", file=sys.stderr, flush=True)


def _router_config(
    prefill: list[str],
    decode: list[str],
    both: list[str],
    ticket_key_file: str | None,
    kv_mode: KVMode,
    policy: Literal["round_robin", "least_loaded"],
    allow_mode_override: bool,
    tokenizer: str | None,
    recovery: Recovery,
    engine: Literal["baton", "vllm"] = "baton",
) -> RouterConfig:
    from baton.handoff.ticket import load_or_create_key
    from baton.router import RouterConfig

    if (prefill or decode) and ticket_key_file is None:
        raise ConfigError("ticket_key_file", "is required with prefill and decode engines")
    return RouterConfig(
        prefill=tuple(prefill),
        decode=tuple(decode),
        both=tuple(both),
        ticket_key=load_or_create_key(ticket_key_file) if ticket_key_file else None,
        kv_mode=kv_mode,
        allow_mode_override=allow_mode_override,
        policy=policy,
        tokenizer=tokenizer,
        recovery=recovery,
        engine=engine,
    )


async def _serve_router(
    config: RouterConfig,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    deployment: Deployment | None = None,
) -> None:
    from baton.router import build_app

    app = await build_app(config)
    if deployment is not None:
        app.cleanup_ctx.append(lambda _: _tell_of_ends(deployment))
    await serve(app, listener, lambda: on_ready(url_of(listener)))


async def _tell_of_ends(deployment: Deployment) -> AsyncIterator[None]:
    """While the app runs, print each child that ends by itself."""

    async def watch() -> None:
        told: set[str] = set()
        while True:
            for name, line in deployment.ended().items():
                if name not in told:
                    told.add(name)
                    print(f"{name} has ended: {line}", file=sys.stderr, flush=True)
            await asyncio.sleep(1.0)

    task = asyncio.create_task(watch())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _split(urls: list[str] | None) -> list[str]:
    return [part for url in urls or [] for part in url.split(",") if part]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("serve")(serve_command)
    app.command("router")(router_command)
    app.command("up")(up_command)

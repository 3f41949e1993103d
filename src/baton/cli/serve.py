"""`baton serve` and `baton up`. Heavy imports wait until the port is known to be free."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from baton.cli.options import BlockSize, EngineOptions, Model, block_size_flags, with_options
from baton.cli.router import (
    AdminTokenFile,
    AllowMode,
    Host,
    KeyFile,
    Keys,
    KvMode,
    Policy,
    Port,
    ReadyFd,
    ShutdownTimeout,
    serve_router,
)
from baton.deployment import Deployment, Reporter
from baton.openai.serving import SHUTDOWN_TIMEOUT_S, bind
from baton.wire import Role


@with_options
def serve_command(
    options: EngineOptions,
    model: Model,
    role: Annotated[Role, typer.Option(help="both serves the API; prefill and decode serve a router.")] = "both",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    ticket_key_file: KeyFile = None,
    keys: Keys = None,
    engine_id: Annotated[str | None, typer.Option(help="Default: role and port.")] = None,
    shutdown_timeout: ShutdownTimeout = SHUTDOWN_TIMEOUT_S,
    ready_fd: ReadyFd = None,
) -> None:
    """Serve one engine with the OpenAI API."""
    reporter = Reporter(ready_fd)
    listener = bind(host, port)
    with contextlib.closing(listener):
        name = engine_id or f"{role}-{listener.getsockname()[1]}"
        config = options.to_config(model, role, name, ticket_key_file, keys)
        from baton.text import Tokenizer

        tokenizer = Tokenizer.load(config.model)
        reporter.progress("loading libraries")
        from baton.engine.async_engine import AsyncEngine
        from baton.server.run import run_engine

        def on_ready(engine: AsyncEngine, url: str) -> None:
            reporter.ready(url)
            if ready_fd is None:
                print(f"{engine.info.model} ({role}) is served at {url}/v1", file=sys.stderr, flush=True)

        run_engine(lambda: AsyncEngine(config, reporter.progress), tokenizer, listener, on_ready, shutdown_timeout)


@with_options
def up_command(
    options: EngineOptions,
    model: Model,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode engines.")] = 1,
    prefill_block_size: BlockSize = None,
    decode_block_size: BlockSize = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    kv_mode: KvMode = "push",
    policy: Policy = "round_robin",
    allow_mode_override: AllowMode = False,
    shutdown_timeout: ShutdownTimeout = SHUTDOWN_TIMEOUT_S,
    admin_token_file: AdminTokenFile = None,
) -> None:
    """A whole P/D deployment on this host: engines as child processes, the router here."""
    from baton.handoff.protocol.ticket import load_or_create_key
    from baton.router import RouterConfig
    from baton.router.admin import admin_token
    from baton.server.run import ending_on_sigterm

    token = admin_token(admin_token_file)
    listener = bind(host, port)
    with contextlib.closing(listener), ending_on_sigterm():
        # Checked here too, so that a bad flag gives one error line instead of one per engine.
        settings = options.to_config(model)
        role_flags = block_size_flags(prefill_block_size, decode_block_size)
        print(f"starting {prefill} prefill and {decode} decode engines of {model}", file=sys.stderr, flush=True)
        deployment = Deployment(
            settings.model,
            prefill,
            decode,
            engine_flags=options.located(settings).to_flags(),
            role_flags=role_flags,
            kv_transport=settings.kv_transfer_config.kv_transport,
            router=False,
            show_progress=True,
        )
        with deployment:
            config = RouterConfig(
                prefill=tuple(deployment.prefill_urls),
                decode=tuple(deployment.decode_urls),
                both=tuple(deployment.both_urls),
                ticket_key=load_or_create_key(deployment.ticket_key_file),
                kv_mode=kv_mode,
                policy=policy,
                allow_mode_override=allow_mode_override,
                tokenizer=settings.model,
                recovery=options.recovery,
                admin_token=token,
                max_queued_requests=options.max_queued_requests,
                host_names=(host,),
            )

            def on_ready(url: str) -> None:
                print(f"ready: {url}/v1   (status: {url}/status, Ctrl-C ends all)", file=sys.stderr, flush=True)

            asyncio.run(serve_router(config, listener, on_ready, lambda _: _tell_of_ends(deployment), shutdown_timeout))
            print("ending all processes", file=sys.stderr, flush=True)


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

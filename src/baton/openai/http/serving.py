"""Listens, serves and shuts down. At shutdown running requests may complete; the rest get an error."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from aiohttp import web

from baton.errors import ConfigError
from baton.openai.http.accepting import Acceptor
from baton.openai.http.app import DRAIN, LIMITS, TLS
from baton.openai.http.connections import LINGER_S, ClientConnection, WriteBacklog
from baton.openai.http.limits import HttpLimits

logger = logging.getLogger(__name__)

# Service managers usually allow 30 s.
SHUTDOWN_TIMEOUT_S = 20.0
_GOODBYE_S = 2.0
# SIGTERMs closer than this count as one: `timeout` and shells signal a process and its group.
_SAME_SIGNAL_S = 1.0


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """Port 0: a free one. `shared`: other processes of this user may listen there too. Raises `ConfigError` for `host`
    or `port`.

    Call it before loading anything slow.
    """
    if not host:
        # A socket would take the empty host as all addresses.
        raise ConfigError("host", "must be an address or a name; 0.0.0.0 stands for all addresses")
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(512)
    except (OSError, OverflowError, ValueError) as error:
        listener.close()
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRINUSE:
            raise ConfigError("port", f"{port} on {host} is already in use") from None
        named = "port" if number == errno.EACCES or isinstance(error, OverflowError) else "host"
        raise ConfigError(named, f"cannot listen on {host}:{port}: {error}") from None
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        logger.warning("LISTENING BEYOND THIS HOST, on %s: whoever reaches this port may use the model", host)
    return listener


def url_of(listener: socket.socket, app: web.Application | None = None) -> str:
    scheme = "http" if app is None or app.get(TLS) is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.asynccontextmanager
async def served(app: web.Application, listener: socket.socket) -> AsyncIterator[Acceptor]:
    """Closing the yielded `Acceptor` stops listening but keeps connections open. A client that disconnects aborts its
    request."""
    limits = app.get(LIMITS) or HttpLimits()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        manager, unread = runner.server, WriteBacklog(limits)
        assert manager is not None

        def connection() -> ClientConnection:
            return ClientConnection(
                manager,
                limits,
                unread,
                access_log=None,
                keepalive_timeout=limits.keep_alive_s,
                tcp_keepalive=False,
                lingering_time=LINGER_S,
                auto_decompress=False,  # it would run before the checks of key and route
            )

        door = Acceptor(manager, listener, connection, app.get(TLS), limits)
        try:
            yield door
        finally:
            door.close()
    finally:
        await runner.cleanup()


async def serve(
    app: web.Application,
    listener: socket.socket,
    on_ready: Callable[[], None],
    stop: asyncio.Event | None = None,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
) -> None:
    """Serve `app` until SIGINT, SIGTERM or `stop` (docs/api.md, "Shutdown"). At the end SIGTERM is ignored: cleanup,
    such as ending children, takes seconds.
    """
    _raise_file_limit()
    asked, ended = asyncio.Event(), stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, sigterm_handler(asked, ended))
    loop.add_signal_handler(signal.SIGINT, ended.set)
    try:
        await serve_until(asked, ended, app, listener, on_ready, shutdown_timeout_s)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def sigterm_handler(
    asked: asyncio.Event, ended: asyncio.Event, clock: Callable[[], float] = time.monotonic
) -> Callable[[], None]:
    first: list[float] = []

    def terminate() -> None:
        if not first:
            first.append(clock())
            asked.set()
        elif clock() - first[0] >= _SAME_SIGNAL_S:
            ended.set()

    return terminate


async def serve_until(
    asked: asyncio.Event,
    ended: asyncio.Event,
    app: web.Application,
    listener: socket.socket,
    on_ready: Callable[[], None],
    shutdown_timeout_s: float,
) -> None:
    """Serve until `asked` and running requests have ended, or until `ended`."""
    drain = app[DRAIN]
    async with served(app, listener) as door:
        on_ready()
        await _first(asked.wait(), ended.wait())
        door.close()
        drain.begin()
        if not ended.is_set() and drain.tasks:
            logger.warning("ending: %d requests have %g s to end", len(drain.tasks), shutdown_timeout_s)
            await _first(drain.idle.wait(), ended.wait(), asyncio.sleep(shutdown_timeout_s))
        drain.end()
        await _first(drain.idle.wait(), asyncio.sleep(_GOODBYE_S))


async def _first(*many: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(one) for one in many]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_file_limit() -> None:
    """Each request has connections of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

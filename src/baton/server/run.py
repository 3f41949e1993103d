"""Loads, serves and closes one engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web

from baton.errors import EngineUnavailableError
from baton.openai.http.serving import SHUTDOWN_TIMEOUT_S, serve, url_of

if TYPE_CHECKING:
    from baton.engine.async_engine import AsyncEngine

_CLOSE_LIMIT_S = 8.0


def run_engine(
    make_engine: Callable[[], AsyncEngine],
    make_app: Callable[[AsyncEngine], web.Application],
    listener: socket.socket,
    on_ready: Callable[[AsyncEngine, str], None],
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
) -> None:
    """Serve one engine until SIGINT or SIGTERM.

    `make_engine` may take long; a signal meanwhile ends the process. Raises the errors of `make_engine`, and
    `EngineUnavailableError` if the engine fails.
    """
    with ending_on_sigterm() as check_end:
        engine = make_engine()
        try:
            check_end()
            engine.start()
            app = make_app(engine)
            ready = functools.partial(on_ready, engine, url_of(listener, app))
            failure = asyncio.run(_serve(engine, app, listener, ready, shutdown_timeout_s))
        finally:
            # The process must end even if the engine's thread hangs.
            limit_s = _CLOSE_LIMIT_S
            if engine.info.data_parallel_rank is not None:
                limit_s += shutdown_timeout_s  # other ranks' requests may still need these experts
            timer = threading.Timer(limit_s, os._exit, [1])
            timer.daemon = True
            timer.start()
            engine.close()
            timer.cancel()
        if failure is not None:
            raise EngineUnavailableError(failure)


async def _serve(
    engine: AsyncEngine,
    app: web.Application,
    listener: socket.socket,
    on_ready: Callable[[], None],
    shutdown_timeout_s: float,
) -> str | None:
    """Serve until a signal (returns None) or until the engine fails (returns the cause)."""
    loop, ended, failures = asyncio.get_running_loop(), asyncio.Event(), list[str]()

    def failed(cause: str) -> None:
        failures.append(cause)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    engine.on_failure(failed)
    await serve(app, listener, on_ready, ended, shutdown_timeout_s)
    return failures[0] if failures else None


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[Callable[[], None]]:
    """The first SIGTERM becomes `SystemExit`, so that `finally` clauses run; later ones are ignored. Main thread only.

    Yields a function that raises it again, if C code dropped it.
    """
    taken: list[int] = []

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        taken.append(number)
        raise SystemExit(128 + number)

    def check_end() -> None:
        if taken:
            raise SystemExit(128 + taken[0])

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield check_end
    except Exception:
        check_end()
        raise
    finally:
        if not taken:  # else the process is ending
            signal.signal(signal.SIGTERM, previous)

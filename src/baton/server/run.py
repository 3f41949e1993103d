"""The life of one engine process: load, serve, end. Its port was bound before anything slow begins."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from baton.openai.http import serve, url_of
from baton.server.app import Engine, build_app
from baton.text import Tokenizer


def run_engine(
    make_engine: Callable[[], Engine],
    tokenizer: Tokenizer,
    listener: socket.socket,
    on_ready: Callable[[Engine, str], None],
) -> None:
    """Serve one engine until SIGINT or SIGTERM, then close it.

    `make_engine` may take long; a signal meanwhile ends the process, with the engine closed if it exists.
    `on_ready` is called with the engine and its URL when requests are served. Ends with what `make_engine`
    raises.
    """
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    engine: Engine | None = None
    try:
        engine = make_engine()
        engine.start()
        started = engine
        app = build_app(engine, tokenizer)
        asyncio.run(serve(app, listener, lambda: on_ready(started, url_of(listener))))
    finally:
        listener.close()
        if engine is not None:
            engine.close()
        signal.signal(signal.SIGTERM, previous)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)

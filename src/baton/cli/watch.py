"""`baton status` and `baton top`: a router's state on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from typing import Annotated, Any, NamedTuple

import aiohttp
import typer

from baton.cli.results import JsonFlag
from baton.errors import EngineUnavailableError, ProtocolError
from baton.observe.terminal import ALARM, fit_to_terminal, status_text
from baton.openai.client import base_url, convert_errors, read_body


class Limits(NamedTuple):
    """Time limits of an answer, and of each event: one comes at least every three seconds."""

    answer_s: float = 15.0
    num_bytes: int = 16 << 20


_LIMITS = Limits()
_Url = Annotated[str, typer.Argument(metavar="URL", help="A router.")]
_HOME_AND_CLEAR = "\x1b[H\x1b[2J"
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


def status_command(url: _Url, json_output: JsonFlag = False) -> None:
    """Print a router's engines, routes, handoffs and alarms. Exit status: 0 if it is ready and has no alarm, else 1."""
    state = asyncio.run(read_status(base_url(url, "url")))
    print(json.dumps(state, indent=1) if json_output else status_text(state))
    if not state["ready"] or state["alarms"]:
        raise typer.Exit(1)


def top_command(url: _Url) -> None:
    """Show a router's state, renewed as it changes, until Ctrl-C. Prints it once if the output is not a terminal."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch_events(base_url(url, "url"), sys.stdout.isatty()))


async def read_status(url: str, limits: Limits = _LIMITS) -> dict[str, Any]:
    """Raises `EngineUnavailableError` if nothing answers, `ProtocolError` if it is no router."""
    timeout = aiohttp.ClientTimeout(total=limits.answer_s)
    with convert_errors(url, EngineUnavailableError):
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/status", allow_redirects=False) as response,
        ):
            return _checked(url, await read_body(response.content, limits.num_bytes))


async def watch_events(url: str, live: bool, limits: Limits = _LIMITS) -> None:
    """`live`: until the router ends. Raises the errors of `read_status`."""
    text = ""

    def draw() -> None:
        columns, lines = shutil.get_terminal_size()
        print(_HOME_AND_CLEAR + _red(fit_to_terminal(text, columns, lines - 1)), flush=True)

    if live:
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, draw)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.answer_s, sock_read=limits.answer_s)
    with convert_errors(url, EngineUnavailableError):
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=limits.num_bytes) as session,
            session.get(f"{url}/dashboard/events", allow_redirects=False) as response,
        ):
            if response.status != 200 or response.content_type != "text/event-stream":
                raise ProtocolError(f"{url} is not a router: it has no dashboard (HTTP {response.status})")
            async for line in response.content:
                if line.startswith(b"data: "):
                    text = status_text(_checked(url, line.removeprefix(b"data: ")))
                    if not live:
                        print(text, flush=True)
                        return
                    draw()
    raise EngineUnavailableError(f"{url} has ended")


def _red(screen: str) -> str:
    if os.environ.get("NO_COLOR"):
        return screen
    lines = (f"{_RED}{line}{_PLAIN}" if line.startswith(ALARM) else line for line in screen.splitlines())
    return "\n".join(lines)


def _checked(url: str, answer: bytes) -> dict[str, Any]:
    """What can be shown is a router's state."""
    try:
        state = json.loads(answer)
        status_text(state)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        raise ProtocolError(f"{url} is not a router, or one of another version") from None
    assert isinstance(state, dict)
    return state

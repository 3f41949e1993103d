"""`baton status` and `baton top`: a router's state on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from typing import Annotated, Any

import typer

from baton.cli.tables import JsonFlag
from baton.errors import EngineUnavailableError, ProtocolError
from baton.openai.client import base_url

_Url = Annotated[str, typer.Argument(metavar="URL", help="A router.")]
_HOME_AND_CLEAR = "\x1b[H\x1b[2J"
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
_MAX_EVENT_BYTES = 4 << 20
# An event comes every three seconds at least.
_ANSWER_S = 15.0


def status_command(url: _Url, json_output: JsonFlag = False) -> None:
    """Print a router's engines, routes, handoffs and alarms. Exit status: 0 if it is ready and has no alarm, else 1."""
    from baton.observe.terminal import status_text

    state = asyncio.run(_status(base_url(url, "url")))
    print(json.dumps(state, indent=1) if json_output else status_text(state))
    if not state["ready"] or state["alarms"]:
        raise typer.Exit(1)


def top_command(url: _Url) -> None:
    """Show a router's state, renewed as it changes, until Ctrl-C. Prints it once if the output is not a terminal."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_top(base_url(url, "url"), sys.stdout.isatty()))


async def _status(url: str) -> dict[str, Any]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/status") as response:
            return _checked(url, await response.json(content_type=None))
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise EngineUnavailableError(f"{url} does not answer: {error}") from None
    except ValueError:
        raise ProtocolError(f"{url} is not a router") from None


async def _top(url: str, live: bool) -> None:
    import aiohttp

    from baton.observe.terminal import fit_to_terminal, status_text

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_S, sock_read=_ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=_MAX_EVENT_BYTES) as session,
            session.get(f"{url}/dashboard/events") as response,
        ):
            if response.status != 200:
                raise ProtocolError(f"{url} has no dashboard: HTTP {response.status}")
            async for line in response.content:
                if line.startswith(b"data: "):
                    state = _checked(url, json.loads(line.removeprefix(b"data: ")))
                    text = status_text(state)
                    if not live:
                        print(text, flush=True)
                        return
                    columns, lines = shutil.get_terminal_size()
                    print(_HOME_AND_CLEAR + _red(fit_to_terminal(text, columns, lines - 1)), flush=True)
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise EngineUnavailableError(f"{url} does not answer: {error}") from None
    except ValueError:
        raise ProtocolError(f"{url} is not a router") from None
    raise EngineUnavailableError(f"{url} has ended")


def _red(screen: str) -> str:
    """With red alarms, unless NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return screen
    lines = (f"{_RED}{line}{_PLAIN}" if line.startswith("ALARM: ") else line for line in screen.splitlines())
    return "\n".join(lines)


def _checked(url: str, state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or not {"engines", "decisions", "alarms"} <= state.keys():
        raise ProtocolError(f"{url} is not a router")
    return state

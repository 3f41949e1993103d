"""`baton status` and `baton top` over a running router."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from aiohttp import web

from baton.cli.watch import Limits, read_status, status_command, top_command, watch_events
from baton.errors import ConfigError, EngineUnavailableError, ProtocolError
from baton.observe.terminal import fit_to_terminal, status_text
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served, status_of
from testkit.servers.fleets import SILENT, Cluster, complete
from tests.router.test_acceptance import named


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_routers_state_as_text(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = named(Cluster(directory, num_prefill=1, num_decode=1))
    async with cluster.run() as (url, session):
        assert (await complete(session, url))[0] == 200
        await asyncio.to_thread(status_command, url)
        shown = capsys.readouterr().out
        assert shown.startswith("ready: 2 of 2 engines can be used")
        assert "prefill-0" in shown
        assert "routes: 1 of the last 1 handed off, 0 local" in shown
        rows = [" ".join(line.split()) for line in shown.splitlines()]
        assert "prefill-0 to decode-0 handed off 1 100% 100% 100% 100%" in rows
        await asyncio.to_thread(top_command, f"{url}/v1")
        shown = capsys.readouterr().out
        assert "in flight: waiting 0, prefill 0, handoff 0, decode 0" in shown
        assert "handed off: TTFT" in shown
        assert "\x1b" not in shown, "it is not a terminal"
        await asyncio.to_thread(status_command, url, True)
        assert json.loads(capsys.readouterr().out)["ready"] is True
        state = await status_of(session, url)
    state["alarms"] = ["acceptance of decode-0 is too low", "\x1b[31mred", "one\nALARM: another"]
    state["engines"][0]["info"]["engine_id"] = "p\nALARM: forged"
    text = status_text(state)
    assert "\x1b" not in text
    assert text.count("\nALARM: ") == len(state["alarms"]), "no name or message begins a line"
    assert "ALARM: acceptance of decode-0 is too low" in text


@pytest.mark.parametrize(
    ("no_color", "shown"), [("", "\x1b[31mALARM: engine is lost\x1b[0m"), ("1", "ALARM: engine is lost")]
)
async def test_top_renews_the_screen_until_the_router_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch, no_color: str, shown: str
) -> None:
    async with named(Cluster(directory, num_prefill=1, num_decode=1)).run() as (url, session):
        state = await status_of(session, url)

    async def events(request: web.Request) -> web.Response:
        told = (json.dumps({**state, "alarms": alarms}) for alarms in ([], ["engine is lost"]))
        return web.Response(text="".join(f"data: {one}\n\n" for one in told), content_type="text/event-stream")

    terminal = Terminal()
    for name, value in {"NO_COLOR": no_color, "COLUMNS": "30", "LINES": "6"}.items():
        monkeypatch.setenv(name, value)
    app = web.Application()
    app.router.add_get("/dashboard/events", events)
    async with served(app) as url:
        with pytest.raises(EngineUnavailableError, match="has ended"), contextlib.redirect_stdout(terminal):
            await asyncio.to_thread(top_command, url)
    screens = [screen.splitlines() for screen in terminal.getvalue().split("\x1b[H\x1b[2J")[1:]]
    assert [len(screen) for screen in screens] == [5, 5]
    assert [screen[1] for screen in screens] == ["", shown]
    assert all(screen[0] == "ready: 2 of 2 engines can be used"[:30] for screen in screens)


@contextlib.asynccontextmanager
async def stranger(answer: bytes) -> AsyncIterator[str]:
    """A server that sends this to whoever asks, and waits until he is gone."""
    running = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
        await asyncio.gather(*(task for task in running if task is not None))


OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\nContent-Length: 10000000\r\n\r\n"
STRANGERS = {
    "a page": (OK + b"Content-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>", "is not a router"),
    "another list": (OK + b"Content-Length: 2\r\n\r\n[]", "is not a router"),
    "a redirect": (b"HTTP/1.1 302 Found\r\nLocation: file:///etc\r\nContent-Length: 0\r\n\r\n", "is not a router"),
    "no HTTP": (b"-ERR unknown command\r\n", "Bad status line"),
    "no end": (EVENTS + b" " * (1 << 20), r"larger than|more than"),
}


COMMANDS: dict[str, Any] = {"status": read_status, "top": functools.partial(watch_events, live=False)}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", STRANGERS)
async def test_other_servers_are_refused_with_what_they_are(command: str, what: str) -> None:
    answer, said = STRANGERS[what]
    async with stranger(answer) as url:
        with pytest.raises((ProtocolError, EngineUnavailableError), match=said):
            await COMMANDS[command](url, limits=Limits(num_bytes=1 << 10))


SHAPES: list[Any] = [
    {},
    [],
    "alarms",
    {"engines": [], "decisions": {}, "alarms": []},
    {"ready": True, "alarms": [], "engines": [{"url": 7}]},
    {"ready": True, "alarms": None, "engines": []},
    {"ready": True, "alarms": [], "engines": [], "handoffs": [], "recoveries": {}, "decisions": {"summary": ""}},
    {
        "ready": True,
        "alarms": [],
        "engines": [
            {
                "url": "",
                "role": "",
                "load": {"kv_usage": 10**400},
                "info": {},
                "draining": 0,
                "healthy": 1,
                "num_inflight": 0,
            }
        ],
    },
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", SHAPES)
async def test_another_state_is_no_routers(command: str, state: Any) -> None:
    told = json.dumps(state).encode()
    answer = OK + b"Content-Length: %d\r\n\r\n" % len(told) + told
    if command == "top":
        answer = EVENTS + b"data: " + told + b"\n\n"
    async with stranger(answer) as url:
        with pytest.raises(ProtocolError, match="is not a router"):
            await COMMANDS[command](url)


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_router_that_hangs_is_said(command: str) -> None:
    async with stranger(b"") as url:
        with pytest.raises(EngineUnavailableError, match=f"{url}: no answer in time"):
            await COMMANDS[command](url, limits=Limits(answer_s=0.2))


async def test_an_engine_is_no_router(directory: Path) -> None:
    app = build_app(FakeEngine(directory), Tokenizer.load(directory))  # type: ignore[arg-type]
    async with served(app) as engine:
        for command in (status_command, top_command):
            with pytest.raises(ProtocolError, match="is not a router"):
                await asyncio.to_thread(command, engine)
    with pytest.raises(EngineUnavailableError, match=r"^http://127\.0\.0\.1:1: cannot connect: Connection refused$"):
        await asyncio.to_thread(status_command, "http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://127.0.0.1:99999", "http://[::1", "ftp://x"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url: must be http://HOST:PORT"):
        status_command(url)


async def test_a_router_that_is_not_ready_ends_with_status_1(directory: Path) -> None:
    cluster = named(Cluster(directory, num_prefill=1, num_decode=1))
    async with cluster.run(timers=SILENT) as (url, session):
        for engine in (await status_of(session, url))["engines"]:
            cluster.stop(cluster.prefills[0] if engine["role"] == "prefill" else cluster.decodes[0])
        while (await status_of(session, url))["ready"]:
            pass
        with pytest.raises((typer.Exit, click.exceptions.Exit)) as ended:
            await asyncio.to_thread(status_command, url)
        assert ended.value.exit_code == 1
        async with session.get(f"{url}/metrics") as response:
            assert 'baton:router_alarms{kind="lost_engine"} 2.0' in await response.text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abcdef\nb", "abcd\nb"),
        ("a\nb\nc", "a\nb\nc"),
        ("a\nb\nc\nd\ne", "a\nb\n... "),
        ("模型模型", "模型"),
        ("a模型", "a模"),
        ("e\u0301" * 5, "e\u0301" * 4),
    ],
)
def test_a_screen_is_never_longer_or_wider_than_the_terminal(text: str, shown: str) -> None:
    assert fit_to_terminal(text, columns=4, lines=3) == shown


def test_an_alarm_is_wrapped() -> None:
    text = f"ALARM: engine {'x' * 20} cannot be used: it hangs\nnext line is cut"
    assert fit_to_terminal(text, columns=15, lines=9).splitlines() == [
        "ALARM: engine x",
        "       xxxxxxxx",
        "       xxxxxxxx",
        "       xxx",
        "       cannot",
        "       be used:",
        "       it hangs",
        "next line is cu",
    ]

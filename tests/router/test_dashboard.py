"""The dashboard: its content, its rights, and a visit in a real browser."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.observe.dashboard import dashboard_page
from baton.openai.http.app import DRAIN
from baton.router import RouterConfig, build_app
from baton.router.timers import RouterTimers
from baton.server import build_app as build_engine_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import ADMIN_TOKEN, KEY, FakeEngine, served, status_of
from testkit.servers.fleets import QUICK, Cluster, complete
from tests.router.test_acceptance import named
from tools.browser.chromium import CHROMIUM, browser

HELD = RouterTimers(check=0.05, answer=0.3, lease=60.0)


async def first_event(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/dashboard/events") as response:
        assert response.content_type == "text/event-stream"
        line = await response.content.readline()
        found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return found


def test_the_page_is_self_contained() -> None:
    page = dashboard_page()
    for elsewhere in ("http://", "https://", "//cdn", "@import", '<link rel="stylesheet'):
        without = page.html.replace("http://www.w3.org/2000/svg", "").replace("http://127.0.0.1:8101", "")
        assert elsewhere not in without
    assert "innerHTML" not in page.html, "texts of engines and clients are never markup"
    assert "unsafe" not in page.policy
    assert page.policy.startswith("default-src 'none'")


async def test_an_answer_to_head_has_no_body(directory: Path) -> None:
    """Else a client or proxy would take it for the next answer on the connection."""
    app = await build_app(RouterConfig(both=("http://127.0.0.1:1",), ticket_key=KEY))
    paths = sorted({route.resource.canonical for route in app.router.routes() if route.resource is not None})
    async with served(app) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        for path in [path for path in paths if "{" not in path]:
            reader, writer = await asyncio.open_connection(host, int(port))
            for method, asked in (("HEAD", path), ("GET", "/version")):
                writer.write(f"{method} {asked} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            for _ in range(2):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 "), path
            writer.close()


async def test_events_have_all_that_the_page_shows(directory: Path) -> None:
    cluster = named(Cluster(directory, num_prefill=1, num_decode=1))
    async with cluster.run(admin_token=ADMIN_TOKEN) as (url, session):
        async with session.get(f"{url}/dashboard") as response:
            assert response.headers["Content-Security-Policy"] == dashboard_page().policy
        assert (await complete(session, url))[0] == 200
        cluster.decodes[0].fail = "mid-stream"
        assert (await complete(session, url, max_tokens=40))[0] != 200
        told = await first_event(session, url)
        assert told["model"] == "fake"
        assert told["admin"] is True
        assert told["stages"] == {"waiting": 0, "prefill": 0, "handoff": 0, "decode": 0}
        assert told["decisions"]["last"] == {"handed_off": 2}
        (point,) = told["latency"]["handed_off"]
        assert point["num_requests"] == 1
        assert point["ttft_ms"] > 0
        assert point["tpot_ms"] > 0
        failed, good = told["requests"]
        assert (good["route"], good["engines"], good["finish"]) == ("handed_off", ["prefill-0", "decode-0"], "length")
        assert [error["id"] for error in told["errors"]] == [failed["id"]]
        assert told["acceptance"]["groups"][0]["decode"] == "decode-0"


async def test_a_request_is_found_by_any_of_its_ids(directory: Path) -> None:
    cluster = named(Cluster(directory, num_prefill=1, num_decode=2))
    cluster.decodes[0].fail = "dies"
    async with cluster.run() as (url, session):
        headers = {"X-Request-Id": "mine"}
        asked = {"prompt": "a", "max_tokens": 30, "n": 2}
        async with session.post(f"{url}/v1/completions", json=asked, headers=headers) as response:
            name = (await response.json())["id"]
        for wanted, count in ((name, 2), (f"{name}-1", 1), ("mine", 2)):
            async with session.get(f"{url}/dashboard/requests/{wanted}") as response:
                choices = (await response.json())["choices"]
            assert len(choices) == count
        for choice in choices:
            events = [event["name"] for event in choice["events"]]
            assert events[:3] == ["route", "first token", "first verification"]
            assert events[-1] == "end"
            assert [event["at_ms"] for event in choice["events"]] == sorted(e["at_ms"] for e in choice["events"])
        assert any("recovery: full" in [event["name"] for event in choice["events"]] for choice in choices)
        async with session.get(f"{url}/dashboard/requests/unknown") as response:
            assert response.status == 404


async def test_an_open_page_does_not_delay_a_shutdown(directory: Path) -> None:
    app = await build_app(RouterConfig(both=("http://127.0.0.1:1",), timers=QUICK))
    async with (
        served(app) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/dashboard/events") as response,
    ):
        await response.content.readline()
        assert app[DRAIN].idle.is_set()
        app[DRAIN].begin()
        assert (await response.content.read()).endswith(b"\n")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
async def test_a_visit_with_a_browser(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator adds an engine, sees another die, finds a request, and does it all with the keyboard."""
    monkeypatch.setenv("TMPDIR", str(directory / "missing"))
    cluster = named(Cluster(directory, num_prefill=1, num_decode=1))
    more = FakeEngine(directory, role="decode", handed=cluster.decodes[0].handed)
    app = build_engine_app(more, Tokenizer.load(directory))  # type: ignore[arg-type]
    async with cluster.run(admin_token=ADMIN_TOKEN, timers=HELD) as (url, session), served(app) as added:
        answers = await asyncio.gather(*(complete(session, url) for _ in range(5)))
        assert {status for status, _ in answers} == {200}
        async with browser() as tab:
            await tab.size(390, 844)
            await tab.open(f"{url}/dashboard")
            await tab.until("document.querySelectorAll('#engines tbody tr').length == 2")
            assert await tab.value("document.documentElement.scrollWidth") <= 390, "a phone does not scroll aside"
            assert await tab.value("document.getElementById('because').innerText") == "5 of the last 5 were handed off."
            assert await tab.value("[...document.querySelectorAll('button[data-what]')].every(b => b.disabled)")

            await tab.value("document.getElementById('administration').open = true")
            await tab.value("document.getElementById('token').focus()")
            await tab.type(ADMIN_TOKEN)
            await tab.press("Tab", 9)
            await tab.type(added)
            await tab.press("Enter", 13, "\r")
            await tab.until("document.querySelectorAll('#engines tbody tr').length == 3")
            assert [engine["url"] for engine in (await status_of(session, url))["engines"]][-1] == added

            cluster.stop(cluster.decodes[0])
            await tab.until("document.querySelectorAll('#engines .pill.bad').length == 1")
            assert "cannot be used" in await tab.value("document.getElementById('alarms').innerText")

            await tab.value("document.getElementById('lookup-id').focus()")
            await tab.type(answers[0][1]["id"])
            await tab.press("Enter", 13, "\r")
            await tab.until("document.querySelector('#timeline svg')")
            assert "first verification" in await tab.value("document.getElementById('timeline').innerText")

            await tab.value(f"document.querySelector('button[data-url=\"{added}\"][data-what=drain]').focus()")
            await tab.press("Enter", 13, "\r")
            await tab.until("document.querySelectorAll('#engines tbody tr').length == 2")
            backgrounds = []
            for dark in (False, True):
                await tab.dark(dark)
                backgrounds.append(await tab.value("getComputedStyle(document.body).backgroundColor"))
            assert len(set(backgrounds)) == 2
            assert tab.errors == []
            cluster.cont(cluster.decodes[0])

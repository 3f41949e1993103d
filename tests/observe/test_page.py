"""The dashboard's page in a real browser, over states and connections that a healthy router does not have."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from baton.event_loop import timeout
from baton.observe.dashboard import dashboard_page
from testkit.servers.fake_serving import served
from tools.browser.chromium import CHROMIUM, browser

MARKUP = "<img src=x onerror=alert(1)>"
LONG = "x" * 300
FOCUSED = "document.activeElement.textContent"
SHOWN = "document.getElementById('state').textContent"


def engine(number: int, **more: Any) -> dict[str, Any]:
    load = {"num_running": 1, "num_waiting": 0, "num_handoffs": 2, "kv_usage": 0.5}
    load |= {"num_prefix_queries": 0, "num_prefix_hits": 0}
    told = {"url": f"http://127.0.0.1:{8000 + number}", "role": "decode", "healthy": True, "draining": False}
    told |= {"problem": None, "num_inflight": 1, "info": {"engine_id": f"{LONG}{number}"}, "load": load}
    return {**told, **more}


def request(name: str, output_tokens: int = 1, **more: Any) -> dict[str, Any]:
    told = {"id": name, "route": "handed_off", "engines": [LONG, LONG], "prompt_tokens": 5, "stage": "decode"}
    told |= {"output_tokens": output_tokens, "ttft_ms": 1.0, "tpot_ms": None, "finish": "", "error": ""}
    return {**told, **more}


def state(**more: Any) -> dict[str, Any]:
    point = {"age_s": 0, "num_requests": 1, "ttft_ms": 1.0, "tpot_ms": 2.0, "handoff_ms": 3.0}
    old = {**point, "age_s": 300, "ttft_ms": 4.0}
    part = {"num_verifications": 1, "acceptance": 0.5, "acceptance_per_pos": [0.5] * 8}
    group = {"route": "handed_off", "prefill": LONG, "decode": LONG, "num_requests": 1}
    told: dict[str, Any] = {
        "ready": True,
        "alarms": [],
        "engines": [engine(number) for number in range(64)],
        "handoffs": {"failed": 1, "failures": {"z" * 80: 1}},
        "decisions": {"last": {"handed_off": 1}},
        "recoveries": {},
        "acceptance": {"groups": [{**group, "first_verification": part, "later_verifications": part}]},
        "num_requests": 2,
        "stages": {"waiting": 0, "prefill": 0, "handoff": 0, "decode": 1},
        "latency": {"handed_off": [point], "local": [old]},
        "requests": [request("first"), request("second")],
        "errors": [],
        "model": LONG,
        "version": "1",
        "admin": False,
    }
    return {**told, **more}


class Router:
    """Serves the page and its events: `state` as it is now, again after each `tell`. `refuses`: the events, with 503.
    `is_silent`: it accepts connections and says nothing."""

    def __init__(self) -> None:
        self.state, self.refuses, self.is_silent = state(), False, False
        self.num_asked = self.num_pages = 0
        self._changed = asyncio.Event()

    def tell(self, **more: Any) -> None:
        self.state = state(**more)
        self._changed.set()
        self._changed = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/dashboard", self._page)
        app.router.add_get("/dashboard/events", self._events)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        self.num_pages += 1
        page = dashboard_page().html
        assert "SILENCE_MS = 15000" in page
        return web.Response(text=page.replace("SILENCE_MS = 15000", "SILENCE_MS = 3000"), content_type="text/html")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        if self.refuses:
            return web.Response(status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while not self.refuses:
            if not self.is_silent:
                await response.write(b"data: " + json.dumps(self.state).encode() + b"\n\n")
            try:
                await asyncio.wait_for(self._changed.wait(), 0.1)
            except asyncio.TimeoutError:
                continue
        return response


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
async def test_a_page_over_many_engines_long_names_markup_and_a_router_that_comes_and_goes() -> None:
    router = Router()
    router.state = state(alarms=[f"{MARKUP}: 5 requests"], errors=[request(LONG, error=MARKUP)])
    async with served(router.app()) as url, browser() as tab:
        await tab.size(390, 844)
        await tab.open(f"{url}/dashboard")
        await tab.until("document.querySelectorAll('#engines tbody tr').length == 64")
        assert await tab.value("document.documentElement.scrollWidth") <= 390, "a phone does not scroll aside"
        assert await tab.value("document.images.length") == 0, "texts are no markup"
        assert "4.0 ms" not in await tab.value("document.querySelector('#ttft .legend').innerText"), "it is old"

        # By keyboard: what has the focus keeps it while the table goes on.
        await tab.press("Tab", 9)
        await tab.press("Enter", 13, "\r")
        assert await tab.value(FOCUSED) == "Engines"
        await tab.value("[...document.querySelectorAll('#requests button')].find(b => b.innerText == 'first').focus()")
        spoken = await tab.value("document.getElementById('announced').textContent")
        assert spoken == f"{MARKUP}: 5 requests"
        router.tell(
            alarms=[f"{MARKUP}: 6 requests"], requests=[request("newest"), request("second"), request("first", 77)]
        )
        await tab.until("document.querySelector('#requests tbody tr').innerText.startsWith('newest')")
        rows = await tab.value("[...document.querySelectorAll('#requests tbody tr')].map(r => r.innerText)")
        assert [row.split()[0] for row in rows] == ["newest", "second", "first"]
        assert "77" in rows[2]
        assert await tab.value(FOCUSED) == "first"
        assert "6 requests" in await tab.value("document.getElementById('alarms').innerText")
        assert await tab.value("document.getElementById('announced').textContent") == spoken, "only a number changed"

        router.tell(engines=[], ready=False)
        await tab.until(f"{SHOWN} == 'no engine can take requests'")
        assert await tab.value("document.querySelectorAll('#engines tbody tr').length") == 0
        assert await tab.value("document.getElementById('announced').textContent") == "no alarms"
        assert tab.errors == []

        router.is_silent = True
        await tab.until(f"{SHOWN} == 'the router does not answer'")
        assert await tab.value("document.body.className") == "stale"
        router.is_silent = False
        await tab.until(f"{SHOWN} == 'no engine can take requests' && document.body.className == ''")
        router.refuses = True
        await tab.until(f"{SHOWN} == 'the router does not answer'")
        asked = router.num_asked
        async with timeout(60.0):
            while router.num_asked < asked + 2:  # a browser alone would not ask again
                await asyncio.sleep(0.02)
        router.refuses = False
        await tab.until(f"{SHOWN} == 'no engine can take requests'")
        router.tell(version="2")  # an upgrade: its page may be another
        async with timeout(60.0):
            while router.num_pages < 2:
                await asyncio.sleep(0.02)

"""What the processes of one router ask each other, over sockets in a directory that only their user can enter.

Whichever process gets a request for `/metrics` or `/status` answers for all, and tells the others of engines that join
or leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.openai.http.metrics import exposition_text
from baton.router.workers.loads import RouterProcess

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0
# Of these only the highest counts. All others are added.
_HIGHEST = frozenset(
    {
        *("baton:draining", "process_start_time_seconds", "process_max_fds"),
        *(f"baton:router_engine_{what}" for what in ("up", "draining", "overloaded", "kv_blocks", "kv_event_gaps")),
    }
)
Change = Callable[[bytes], Awaitable[object]]


class Siblings:
    """Processes that do not answer are left out."""

    def __init__(self, worker: RouterProcess) -> None:
        self._worker = worker
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @contextlib.asynccontextmanager
    async def serving(
        self,
        families: Callable[[], Iterable[Metric]],
        status: Callable[[], dict[str, object]],
        changes: dict[str, Change],
    ) -> AsyncIterator[None]:
        """Answers the others."""

        async def own_metrics(request: web.Request) -> web.Response:
            return web.Response(body=exposition_text(families()))

        async def own_status(request: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(status()))

        async def change(request: web.Request) -> web.Response:
            await changes[request.match_info["name"]](await request.read())
            return web.Response()

        app = web.Application()
        app.router.add_get("/metrics", own_metrics)
        app.router.add_get("/status", own_status)
        app.router.add_post("/{name}", change)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        path = Path(self._worker.socket(self._worker.number))
        path.unlink(missing_ok=True)  # of a predecessor that was killed
        await web.UnixSite(runner, str(path)).start()
        for other in range(self._worker.num):
            if other != self._worker.number:
                connector = aiohttp.UnixConnector(self._worker.socket(other))
                timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
                self._sessions[other] = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            yield
        finally:
            for session in self._sessions.values():
                await session.close()
            await runner.cleanup()

    async def metrics(self, own: Iterable[Metric]) -> list[Metric]:
        """The families of all processes."""
        found = {family.name: family for family in own}
        for page in await self._ask("GET", "metrics"):
            for family in text_string_to_metric_families(page.decode()):
                if family.name in found:
                    _add(found[family.name], family)
                else:
                    found[family.name] = family
        return list(found.values())

    async def statuses(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(page) for page in await self._ask("GET", "status")]

    async def tell(self, change: str, body: bytes) -> None:
        """All others do a change that this process has done."""
        await self._ask("POST", change, body)

    async def _ask(self, method: str, path: str, body: bytes = b"") -> list[bytes]:
        async def ask(session: aiohttp.ClientSession) -> bytes | None:
            try:
                async with session.request(method, f"http://worker/{path}", data=body) as response:
                    response.raise_for_status()
                    return await response.read()
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                logger.warning("a process of this router does not answer %s: %s", path, error or type(error).__name__)
                return None

        answers = await asyncio.gather(*map(ask, self._sessions.values()))
        return [answer for answer in answers if answer is not None]


def merge(own: Any, other: Any) -> Any:
    """Parts of a status: numbers are added, but not speeds; all else is `own`."""
    if isinstance(own, bool) or isinstance(other, bool):
        return own
    if isinstance(own, int | float) and isinstance(other, int | float):
        return own + other
    if isinstance(own, dict) and isinstance(other, dict):
        both = {name: merge(own[name], value) for name, value in other.items() if name in own}
        speeds = {name: value for name, value in own.items() if name.endswith("_per_s")}
        return {**own, **other, **both, **speeds}
    return own


def _add(into: Metric, other: Metric) -> None:
    places = {(one.name, tuple(sorted(one.labels.items()))): place for place, one in enumerate(into.samples)}
    for sample in other.samples:
        place = places.get((sample.name, tuple(sorted(sample.labels.items()))))
        if place is None:
            into.samples.append(sample)
            continue
        before = into.samples[place]
        highest = into.name in _HIGHEST
        value = max(before.value, sample.value) if highest else before.value + sample.value
        into.samples[place] = before._replace(value=value)

"""Requests between the processes of one router, over sockets in their user's private directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import BatonError
from baton.openai.http.metrics import exposition_text
from baton.router.workers.loads import RouterProcess
from baton.wire import Role

logger = logging.getLogger(__name__)

# Merged by the maximum over all processes; other metrics are summed.
_HIGHEST = frozenset(
    {
        *("baton:draining", "process_start_time_seconds", "process_max_fds"),
        *(f"baton:router_engine_{what}" for what in ("up", "draining", "overloaded", "kv_blocks", "kv_event_gaps")),
    }
)
Change = Callable[[bytes], Awaitable[object]]


class Member(msgspec.Struct, frozen=True):
    """An engine of a pool."""

    url: str
    role: Role


class Siblings:
    """Processes that do not answer are omitted, and get changes when they do."""

    def __init__(self, worker: RouterProcess, answer_s: float = 2.0, again_s: float = 0.5) -> None:
        """`answer_s`: how long to wait for an answer. `again_s`: the pause before a change is sent again."""
        self._worker, self._answer_s, self._again_s = worker, answer_s, again_s
        self._start, self._num_changes = secrets.token_hex(8), 0
        self._done: dict[str, int] = {}
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._changes: dict[int, deque[tuple[str, bytes]]] = {}
        self._senders: dict[int, asyncio.Task[None]] = {}

    async def members(self) -> list[Member] | None:
        """The engines of a process that serves already, those in use first; None if there is none."""
        async with self._connected():
            pages = await self._ask("members", quiet=True)
        return msgspec.json.decode(pages[0], type=list[Member]) if pages else None

    @contextlib.asynccontextmanager
    async def serving(
        self,
        families: Callable[[], Iterable[Metric]],
        status: Callable[[], dict[str, object]],
        members: Callable[[], list[Member]],
        changes: dict[str, Change],
    ) -> AsyncIterator[None]:
        async def own_metrics(request: web.Request) -> web.Response:
            return web.Response(body=exposition_text(families()))

        async def own_status(request: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(status()))

        async def own_members(request: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(members()))

        async def change(request: web.Request) -> web.Response:
            sender, number = request.query["sender"], int(request.query["number"])
            if number <= self._done.get(sender, 0):
                return web.Response()  # sent again, since the answer was late
            self._done[sender] = number
            try:
                await changes[request.match_info["name"]](await request.read())
            except BatonError as error:
                return web.Response(status=409, text=str(error))
            return web.Response()

        app = web.Application()
        app.router.add_get("/metrics", own_metrics)
        app.router.add_get("/status", own_status)
        app.router.add_get("/members", own_members)
        app.router.add_post("/{name}", change)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        path = Path(self._worker.socket(self._worker.number))
        path.unlink(missing_ok=True)  # left by a predecessor that was killed
        await web.UnixSite(runner, str(path)).start()
        try:
            async with self._connected():
                yield
        finally:
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=self._answer_s)
        for other in set(range(self._worker.num)) - {self._worker.number}:
            connector = aiohttp.UnixConnector(self._worker.socket(other))
            self._sessions[other] = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            yield
        finally:
            senders, self._senders = list(self._senders.values()), {}
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)
            for session in self._sessions.values():
                await session.close()
            self._sessions.clear()

    async def metrics(self, own: Iterable[Metric]) -> list[Metric]:
        """The families of all processes."""
        families = {family.name: family for family in own}
        for page in await self._ask("metrics"):
            for family in text_string_to_metric_families(page.decode()):
                if family.name in families:
                    _add(families[family.name], family)
                else:
                    families[family.name] = family
        return list(families.values())

    async def statuses(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(page) for page in await self._ask("status")]

    async def broadcast(self, change: str, body: bytes) -> None:
        """Repeat a change in all other processes. Those that do not answer soon get it later."""
        self._num_changes += 1
        path = f"{change}?sender={self._start}&number={self._num_changes}"
        for other in self._sessions:
            self._changes.setdefault(other, deque()).append((path, body))
            if other not in self._senders or self._senders[other].done():
                self._senders[other] = asyncio.create_task(self._send(other))
        if self._senders:
            await asyncio.wait(self._senders.values(), timeout=self._answer_s)

    async def _send(self, other: int) -> None:
        """In order, each change until the process answers."""
        changes = self._changes[other]
        while changes:
            path, body = changes[0]
            name, _, _ = path.partition("?")
            try:
                async with self._sessions[other].post(f"http://worker/{path}", data=body) as response:
                    if response.status >= 400:
                        logger.warning("router process %d refuses to %s: %s", other, name, await response.text())
                changes.popleft()
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                logger.warning("router process %d does not %s: %s", other, name, error or type(error).__name__)
                await asyncio.sleep(self._again_s)

    async def _ask(self, path: str, quiet: bool = False) -> list[bytes]:
        async def ask(session: aiohttp.ClientSession) -> bytes | None:
            try:
                async with session.get(f"http://worker/{path}") as response:
                    response.raise_for_status()
                    return await response.read()
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if not quiet:
                    reason = error or type(error).__name__
                    logger.warning("a process of this router does not answer %s: %s", path, reason)
                return None

        answers = await asyncio.gather(*map(ask, self._sessions.values()))
        return [answer for answer in answers if answer is not None]


def merge(own: Any, other: Any) -> Any:
    """Merge parts of a status: numbers are added, except speeds; all else is `own`'s."""
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

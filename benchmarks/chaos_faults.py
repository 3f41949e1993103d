"""What `benchmarks.chaos` does to engines: one `Breaker` for each role."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from baton.errors import BatonError
from benchmarks.chaos_report import ChaosReport
from benchmarks.deployment import BreakableDeployment
from benchmarks.scrape import get_json, scrape

# "met, stop": killed, restarted, and halted when the first leg has brought it a session with a peer (HELLO).
FAULTS = ("kill", "stop, cont", "stop, kill", "met, stop")
# Longer than a lease, so that peers and router give the engine up, or so short that nobody notices.
LONG_STOP_S, SHORT_STOP_S = (5.5, 8.0), (0.1, 2.0)
REJOIN_LIMIT_S = 60.0
MEET_LIMIT_S = 5.0


def engines_of(deployment: BreakableDeployment) -> dict[str, str]:
    """Base URL of each engine by its name."""
    names = [name for name in deployment.pids if not name.startswith("router")]
    return dict(zip(names, deployment.engine_urls, strict=True))


async def count_recoveries(session: aiohttp.ClientSession, report: ChaosReport, url: str) -> None:
    """Book what an engine recovered from; its counters die with it."""
    for rung in ("retry", "recompute"):
        count = sum(await scrape(session, url, "baton:recoveries", rung=rung))
        report.recoveries["engine", rung] += int(count)


async def await_healthy(session: aiohttp.ClientSession, deployment: BreakableDeployment, name: str) -> None:
    """Wait until all routers use an engine. Raises `BatonError` after `REJOIN_LIMIT_S`."""
    url, deadline = engines_of(deployment)[name], time.monotonic() + REJOIN_LIMIT_S
    for router in deployment.router_urls:
        while True:
            status = await get_json(session, f"{router}/status")
            if any(engine["url"] == url and engine["healthy"] for engine in status["engines"]):
                break
            if time.monotonic() > deadline:
                raise BatonError(f"{name} did not rejoin: {status}")
            await asyncio.sleep(0.1)


class Breaker:
    """Breaks engines of one role, one at a time, by a seeded choice. `pids` gets the processes that it starts."""

    def __init__(
        self,
        role: str,
        rng: random.Random,
        session: aiohttp.ClientSession,
        deployment: BreakableDeployment,
        report: ChaosReport,
        pids: set[int],
    ) -> None:
        self._role, self._rng, self._session = role, rng, session
        self._deployment, self._report, self._pids = deployment, report, pids
        self._names = [name for name in deployment.pids if name.startswith(role)]
        self.num_faults = 0

    async def run(self, pause_s: tuple[float, float], over: asyncio.Event) -> None:
        """Go on until `over`; at the end all engines of the role run."""
        ways: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
            "kill": self._kill,
            "stop, cont": self._stop_and_cont,
            "stop, kill": self._stop_and_kill,
            "met, stop": self._stop_when_met,
        }
        # Each kind once, in any order, before any comes again.
        bag: list[str] = []
        while True:
            await asyncio.sleep(self._rng.uniform(*pause_s))
            if over.is_set():
                return
            bag = bag or self._rng.sample(FAULTS, len(FAULTS))
            kind, name = bag.pop(), self._rng.choice(self._names)
            self._report.faults[self._role, kind] += 1
            await ways[kind](name)
            await await_healthy(self._session, self._deployment, name)
            self.num_faults += 1

    async def _kill(self, name: str) -> None:
        await count_recoveries(self._session, self._report, engines_of(self._deployment)[name])
        self._deployment.kill(name)
        await self._restart(name)

    async def _stop_and_cont(self, name: str) -> None:
        self._deployment.stop(name)
        await asyncio.sleep(self._stop_s())
        self._deployment.cont(name)

    async def _stop_and_kill(self, name: str) -> None:
        self._deployment.stop(name)
        await asyncio.sleep(self._stop_s())
        self._deployment.kill(name)
        await self._restart(name)

    async def _stop_when_met(self, name: str) -> None:
        await self._kill(name)
        deadline = time.monotonic() + MEET_LIMIT_S
        url = f"{engines_of(self._deployment)[name]}/inference/v1/load"
        while time.monotonic() < deadline and not (await get_json(self._session, url))["num_handoffs"]:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0.0, 0.01))))
        await self._stop_and_cont(name)

    def _stop_s(self) -> float:
        return self._rng.uniform(*self._rng.choice((LONG_STOP_S, SHORT_STOP_S)))

    async def _restart(self, name: str) -> None:
        # From this thread, which outlives it: an engine ends with the thread that started it.
        self._deployment.restart(name, wait=False)
        self._pids.add(self._deployment.pids[name])
        await asyncio.to_thread(self._deployment.await_ready, name)
        started = time.monotonic()
        await await_healthy(self._session, self._deployment, name)
        self._report.rejoined_s.append(time.monotonic() - started)

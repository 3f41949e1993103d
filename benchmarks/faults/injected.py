"""The faults that `benchmarks.faults.chaos` injects into engines: one `Breaker` per role."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from baton.errors import BatonError
from baton.openai.client import OpenAIClient
from benchmarks.deployment import BreakableDeployment
from benchmarks.faults.report import ChaosReport
from benchmarks.scrape import get_json, scrape

# "met, stop": killed, restarted, and stopped when the first leg has opened a session with a peer (HELLO).
FAULTS = ("kill", "stop, cont", "stop, kill", "met, stop")
# Kill one rank's process (not the first, or the first) while the engine has handoffs; the other ranks end with it.
KILL_RANK, KILL_RANK_0 = "kill rank", "kill rank 0"
# Kill or stop one data-parallel rank while this rank has handoffs.
KILL_DATA_RANK, HALT_DATA_RANK = "kill data-parallel rank", "halt data-parallel rank"
# Longer than a lease, so that peers and router give the engine up, or too short to be noticed.
LONG_STOP_S, SHORT_STOP_S = (5.5, 8.0), (0.1, 2.0)
REJOIN_LIMIT_S = 60.0
MEET_LIMIT_S = 5.0
# Of this, an engine may take 8 s to close, and its clients the rest to notice.
END_LIMIT_S = 30.0


async def count_recoveries(session: aiohttp.ClientSession, report: ChaosReport, url: str) -> None:
    """Add an engine's recoveries to the report, before its counters are lost with it."""
    for rung in ("retry", "recompute"):
        count = sum(await scrape(session, url, "baton:recoveries", rung=rung))
        report.recoveries["engine", rung] += int(count)
    for sample in await OpenAIClient(session, url).samples():
        if sample.name.startswith("baton:handoff_failures") and sample.value:
            report.reasons[sample.labels["reason"]] += int(sample.value)


async def await_healthy(session: aiohttp.ClientSession, deployment: BreakableDeployment, name: str) -> None:
    """Wait until all routers use all ranks of an engine. Raises `BatonError` after `REJOIN_LIMIT_S`."""
    urls, deadline = set(deployment.engines_urls[name]), time.monotonic() + REJOIN_LIMIT_S
    for router in deployment.router_urls:
        while True:
            status = await get_json(session, f"{router}/status")
            if urls <= {engine["url"] for engine in status["engines"] if engine["healthy"]}:
                break
            if time.monotonic() > deadline:
                raise BatonError(f"{name} did not rejoin: {status}")
            await asyncio.sleep(0.1)


def rank_processes(pid: int, what: bytes = b"baton.engine.ranks.worker") -> list[int]:
    """The processes of an engine's ranks except the first, or with `--data-parallel-rank` of its data-parallel ranks,
    in the order of their start.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat, command = path.read_text().rpartition(")")[2].split(), (path.parent / "cmdline").read_bytes()
        except OSError:
            continue  # the process has ended
        if int(stat[1]) == pid and what in command:
            found.append((int(stat[19]), int(path.parent.name)))
    return [process for _, process in sorted(found)]


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Breaker:
    """Breaks engines of one role, one at a time, by seeded choice. Adds the processes that it starts to `pids`."""

    def __init__(
        self,
        role: str,
        rng: random.Random,
        session: aiohttp.ClientSession,
        deployment: BreakableDeployment,
        report: ChaosReport,
        pids: set[int],
        faults: Sequence[str] = FAULTS,
    ) -> None:
        self._faults = faults
        self._role, self._rng, self._session = role, rng, session
        self._deployment, self._report, self._pids = deployment, report, pids
        self._names = [name for name in deployment.pids if name.startswith(role)]
        self.num_faults = 0

    async def run(self, pause_s: tuple[float, float], over: asyncio.Event) -> None:
        """Inject faults until `over`. At the end all engines of the role run."""
        ways: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
            "kill": self._kill,
            "stop, cont": self._stop_and_cont,
            "stop, kill": self._stop_and_kill,
            "met, stop": self._stop_when_met,
            KILL_RANK: self._kill_rank,
            KILL_RANK_0: self._kill_rank_0,
            KILL_DATA_RANK: self._kill_data_rank,
            HALT_DATA_RANK: self._halt_data_rank,
        }
        # Each kind once, in random order, before any repeats.
        bag: list[str] = []
        while True:
            await asyncio.sleep(self._rng.uniform(*pause_s))
            if over.is_set():
                return
            bag = bag or self._rng.sample(self._faults, len(self._faults))
            kind, name = bag.pop(), self._rng.choice(self._names)
            self._report.faults[self._role, kind] += 1
            await ways[kind](name)
            await await_healthy(self._session, self._deployment, name)
            self.num_faults += 1

    async def _kill(self, name: str) -> None:
        await self._count_recoveries(name)
        ranks = self._data_ranks(name)
        self._deployment.kill(name)
        await self._gone(name, ranks, time.monotonic())
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
        await self._until_handoffs(name)
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0.0, 0.01))))
        await self._stop_and_cont(name)

    async def _kill_rank(self, name: str) -> None:
        ranks = await self._in_handoff(name)
        os.kill(self._rng.choice(ranks), signal.SIGKILL)
        await self._ended_with_a_rank(name, ranks)
        if not re.search(r"rank \d (ended with status -9|has gone)", self._deployment.log(name)):
            self._report.leaks.append(f"{name} does not say which rank died")
        self._deployment.kill(name)
        await self._restart(name)

    async def _kill_rank_0(self, name: str) -> None:
        ranks = await self._in_handoff(name)
        os.kill(self._deployment.pids[name], signal.SIGKILL)
        await self._ended_with_a_rank(name, ranks)
        self._deployment.kill(name)
        await self._restart(name)

    async def _kill_data_rank(self, name: str) -> None:
        await self._count_recoveries(name)
        ranks, cause = self._data_ranks(name), "data-parallel rank {} ended with status -9"
        number = self._rng.randrange(len(ranks))
        before = self._deployment.log(name).count(cause.format(number))
        self._report.in_handoff += await self._rank_in_handoff(name, number)
        os.kill(ranks[number], signal.SIGKILL)
        await self._ended_with_a_rank(name, ranks)
        if self._deployment.log(name).count(cause.format(number)) == before:
            self._report.leaks.append(f"{name} does not say that rank {number} died")
        self._deployment.kill(name)
        await self._restart(name)

    async def _halt_data_rank(self, name: str) -> None:
        """Ranks that share experts compute nothing meanwhile."""
        ranks = self._data_ranks(name)
        number = self._rng.randrange(len(ranks))
        await self._rank_in_handoff(name, number)
        os.kill(ranks[number], signal.SIGSTOP)
        await asyncio.sleep(self._stop_s())
        os.kill(ranks[number], signal.SIGCONT)

    def _data_ranks(self, name: str) -> list[int]:
        """The data-parallel processes by rank; empty if the engine has one rank."""
        ranks = rank_processes(self._deployment.pids[name], b"--data-parallel-rank")
        self._pids.update(ranks)
        return ranks

    async def _rank_in_handoff(self, name: str, number: int) -> bool:
        """Wait until a data-parallel rank has handoffs, and a little longer. Returns whether it still has some."""
        url, deadline = self._deployment.engines_urls[name][number], time.monotonic() + MEET_LIMIT_S
        while time.monotonic() < deadline:
            if await self._handoffs_at(url):
                await asyncio.sleep(self._rng.uniform(0.0, 0.05))
                if await self._handoffs_at(url):
                    return True
            await asyncio.sleep(0.001)
        return False

    async def _in_handoff(self, name: str) -> list[int]:
        """Wait until an engine has handoffs, and a little longer. Returns its ranks except the first."""
        await self._count_recoveries(name)
        ranks = rank_processes(self._deployment.pids[name])
        if not ranks:
            raise BatonError(f"{name} has no rank but the first")
        deadline = time.monotonic() + MEET_LIMIT_S
        while True:
            await self._until_handoffs(name)
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))
            if await self._num_handoffs(name):
                self._report.in_handoff += 1
                return ranks
            if time.monotonic() > deadline:
                return ranks

    async def _ended_with_a_rank(self, name: str, ranks: Sequence[int]) -> None:
        """Wait until all of an engine's processes have ended."""
        started = time.monotonic()
        waited = asyncio.create_task(asyncio.to_thread(self._deployment.wait, name))
        if not (await asyncio.wait({waited}, timeout=END_LIMIT_S))[0]:
            # SIGABRT prints the threads' stacks (`PYTHONFAULTHANDLER`).
            os.kill(self._deployment.pids[name], signal.SIGABRT)
            await waited
            self._report.leaks.append(f"{name} did not end within {END_LIMIT_S:g} s: {self._deployment.log(name)}")
        status = await waited
        await self._gone(name, ranks, started)
        self._report.ended_s.append(time.monotonic() - started)
        if status == 0:
            self._report.leaks.append(f"{name} ended with status 0")

    async def _gone(self, name: str, ranks: Sequence[int], started: float) -> None:
        """Wait until the ranks have ended: the kernel ends them with their engine, and until then they occupy its
        ports.
        """
        while any(alive(pid) for pid in ranks) and time.monotonic() < started + END_LIMIT_S:
            await asyncio.sleep(0.01)
        self._report.leaks += [f"rank {pid} of {name} lives on" for pid in ranks if alive(pid)]

    async def _until_handoffs(self, name: str) -> None:
        deadline = time.monotonic() + MEET_LIMIT_S
        while time.monotonic() < deadline and not await self._num_handoffs(name):
            await asyncio.sleep(0.001)

    async def _num_handoffs(self, name: str) -> int:
        return sum([await self._handoffs_at(url) for url in self._deployment.engines_urls[name]])

    async def _handoffs_at(self, url: str) -> int:
        return int((await get_json(self._session, f"{url}/inference/v1/load"))["num_handoffs"])

    async def _count_recoveries(self, name: str) -> None:
        for url in self._deployment.engines_urls[name]:
            await count_recoveries(self._session, self._report, url)

    def _stop_s(self) -> float:
        return self._rng.uniform(*self._rng.choice((LONG_STOP_S, SHORT_STOP_S)))

    async def _restart(self, name: str) -> None:
        # From this thread, which outlives the engine: an engine ends with the thread that started it.
        self._deployment.restart(name, wait=False)
        self._pids.add(self._deployment.pids[name])
        await asyncio.to_thread(self._deployment.await_ready, name)
        started = time.monotonic()
        await await_healthy(self._session, self._deployment, name)
        self._report.rejoined_s.append(time.monotonic() - started)

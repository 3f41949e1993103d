"""`python -m testkit.vllm.killed_ranks`: many requests, by push and by pull, through a router over two vLLM servers,
each of two data-parallel ranks with half of the experts, with MTP. Clients leave at random moments, and one rank of
each server is killed and its server restarted.

Each answer must be one vLLM's tokens, or an error that says why. After each kill, and at the end, no rank may hold a
block. Needs vLLM's environment (`tools/install_vllm.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from baton.event_loop import timeout
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.router import RouterConfig, build_app
from baton.router.timers import RouterTimers
from benchmarks.vllm.servers import VllmServer, free_port
from testkit.servers.fake_serving import served, status_of
from testkit.vllm.answers import Answer, same
from testkit.vllm.checkpoints import MLA, MTP, deepseek_experts
from testkit.vllm.checks import alone
from testkit.vllm.quiet import small_servers
from testkit.vllm.servers import LIMIT_S, Server, demo_prompts, request, serve, wait_idle

RANKS = 2
FLAGS = ["--attention-backend", MLA, "--data-parallel-size", str(RANKS), "--enable-expert-parallel"]
LEASE_S = 15.0
HANGS_S = 60.0
TIMEOUT = aiohttp.ClientTimeout(total=LIMIT_S)
ROLES = {"P": "kv_producer", "D": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class Config:
    """`requests` of `at_once` clients, of `prompts` different ones; a share `leaving` of the clients leaves. `outage`:
    requests that are sent while a server is dead or dying. `seed`: of all choices.
    """

    requests: int = 2000
    at_once: int = 12
    prompts: int = 40
    num_tokens: int = 16
    leaving: float = 0.1
    outage: int = 40
    seed: int = 0

    @property
    def kills(self) -> tuple[tuple[str, int], ...]:
        """Of servers and ranks."""
        return (("P", (self.seed + 1) % RANKS), ("D", self.seed % RANKS))


@dataclass(slots=True)
class Report:
    """`ends`: requests by outcome. `wrong`: what may not be: answers that are neither exact nor named errors. `ends_s`:
    how long a server outlived its killed rank; None if it did not end by itself. `status`: the router's at the end.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ends_s: dict[str, float | None] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)

    def counts(self) -> str:
        counts = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return f"{self.ends.total()} requests: {counts}; {len(self.wrong)} wrong"

    def check_handoffs(self) -> None:
        """Most answers must come from handoffs."""
        if (completed := self.status["handoffs"]["completed"]) < self.ends["exact"] // 2:
            self.wrong.append(f"{completed} handoffs were completed")

    def text(self) -> str:
        lines = [self.counts(), *self.wrong[:5]]
        for rank, s in self.ends_s.items():
            lines.append(f"{rank} was killed, and its server {'hung' if s is None else f'ended after {s:.1f} s'}")
        lines += [f"router: {name} {json.dumps(self.status[name])}" for name in ("handoffs", "recoveries")]
        return "\n".join([*lines, "after each kill and at the end no rank held a block"])


def signal_rank(server: VllmServer, rank: int, number: signal.Signals) -> None:
    """Signal one process of a server: that of a tensor rank, a stage, or a data-parallel rank."""
    for pid in server._processes():
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if re.match(rb"VLLM::(Worker_TP|Worker_PP|EngineCore_DP)%d\b" % rank, title):
            os.kill(pid, number)
            return
    raise AssertionError(f"{server.name} has no rank {rank}")


def run_killed_ranks(config: Config, folder: Path) -> Report:
    """Run everything under `small_servers`, with logs in `folder`. All processes have ended when this returns."""
    deepseek_experts(folder / "model")
    rng = random.Random(config.seed)
    prompts = demo_prompts([rng.randrange(2, 400) for _ in range(config.prompts)], seed=config.seed)
    make_keys(folder / "keys", [*ROLES])
    return asyncio.run(_Run(config, folder, prompts).run())


class _Run:
    def __init__(self, config: Config, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        self._config, self._folder, self._prompts = config, folder, prompts
        self._report = Report()
        self._ports = {name: free_port() for name in ROLES}
        self._servers: dict[str, Server] = {}
        self._running: dict[str, contextlib.ExitStack] = {}
        self._sent, self._killed = 0, 0.0

    async def run(self) -> Report:
        try:
            await asyncio.gather(*(asyncio.to_thread(self._start, name) for name in ROLES))
            one = await asyncio.to_thread(self._servers["D"].of_rank, 0)
            self._expected = await alone(one, self._prompts, self._config.num_tokens)
            urls = {n: tuple(f"{s.url}#dp_rank={rank}" for rank in range(RANKS)) for n, s in self._servers.items()}
            key = load_or_create_key(ticket_key_file(self._folder / "keys"))
            own = RouterConfig(
                ticket_key=key, engine="vllm", allow_mode_override=True, timers=RouterTimers(lease=LEASE_S)
            )
            settings = dataclasses.replace(own, prefill=urls["P"], decode=urls["D"])
            async with served(await build_app(settings)) as url, aiohttp.ClientSession() as self._session:
                await self._all(url)
                self._report.status = await status_of(self._session, url)
                self._report.check_handoffs()
        finally:
            for running in self._running.values():
                await asyncio.to_thread(running.close)
        return self._report

    def _start(self, name: str) -> None:
        """At its own port, again if it has died."""
        flags = [*FLAGS, "--port", str(self._ports[name])]
        hooks = {name: "collectives.Gathering"}
        running, model = contextlib.ExitStack(), self._folder / "model"
        configs = [(name, ROLES[name], flags)]
        (server,) = running.enter_context(serve(self._folder, configs, {"lease": LEASE_S}, MTP, model, hooks=hooks))
        self._servers[name], self._running[name] = server, running

    async def _all(self, url: str) -> None:
        config = self._config
        for name, rank in config.kills:
            await self._until_ready(url)
            kill = functools.partial(signal_rank, self._servers[name], rank, signal.SIGKILL)
            await self._send(url, config.requests // (len(config.kills) + 1), kill)
            await self._end(name, rank)
            await self._pools_are_whole(*(self._servers.keys() - {name}))
            print(f"rank {rank} of {name} was killed: {self._report.counts()}", flush=True)
            await asyncio.to_thread(self._start, name)
        await self._until_ready(url)
        await self._send(url, config.requests - self._sent)
        await self._pools_are_whole(*self._servers)

    async def _end(self, name: str, rank: int) -> None:
        """Wait until a server has ended by itself, and end what is left. vLLM 0.32's API server may hang at its end."""
        server = self._servers[name]
        with contextlib.suppress(TimeoutError):
            async with timeout(HANGS_S):
                while server.process.poll() is None:
                    await asyncio.sleep(0.1)
        ended = None if server.process.poll() is None else time.monotonic() - self._killed
        self._report.ends_s[f"rank {rank} of {name}"] = ended
        with contextlib.suppress(ProcessLookupError):
            await asyncio.to_thread(server.kill)
        await asyncio.to_thread(self._running.pop(name).close)
        server.log.rename(server.log.with_suffix(".killed"))

    async def _until_ready(self, url: str) -> None:
        async with timeout(LIMIT_S):
            while any(engine["problem"] for engine in (await status_of(self._session, url))["engines"]):
                await asyncio.sleep(0.2)

    async def _pools_are_whole(self, *names: str) -> None:
        ranks = [self._servers[name].of_rank for name in names]
        found = await asyncio.gather(*(asyncio.to_thread(of, rank) for of in ranks for rank in range(RANKS)))
        await asyncio.to_thread(wait_idle, *found)

    async def _send(self, url: str, num: int, kill: Callable[[], None] | None = None) -> None:
        """With `kill`, call it when all but `outage` requests have been sent, in the midst of others. A client whose
        request failed sends no other one in this round."""
        end = self._sent + num
        numbers = iter(range(self._sent, end))

        async def client() -> None:
            for number in numbers:
                if kill is not None and number == end - self._config.outage:
                    kill()
                    self._killed = time.monotonic()
                self._sent += 1
                if not await self._one(url, number):
                    return

        await asyncio.gather(*(client() for _ in range(self._config.at_once)))

    async def _one(self, url: str, number: int) -> bool:
        """Returns whether it was answered, or left."""
        rng, report = random.Random(f"{self._config.seed} {number}"), self._report
        which = rng.randrange(len(self._prompts))
        body = request(self._prompts[which], self._config.num_tokens, kv_mode=rng.choice(["push", "pull"]))
        task = asyncio.create_task(self._complete(url, body))
        if rng.random() < self._config.leaving:
            await asyncio.wait([task], timeout=rng.random())
            if task.cancel():
                await asyncio.wait([task])
                report.ends["left"] += 1
                return True
        try:
            status, body = await task
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            report.ends["wrong"] += 1
            report.wrong.append(f"request {number}: {error!r}")
            return False
        if status != 200:
            error = body.get("error") or {}
            report.ends[f"error {status} {error.get('type')} {error.get('code')}"] += 1
            if not error.get("message"):
                report.wrong.append(f"request {number}: {body}")
            return False
        found, want = Answer.of(body), self._expected[which]
        verdict = same(found, want) if len(found.tokens) == len(want.tokens) else False
        report.ends["exact" if verdict else "near tie" if verdict is None else "wrong"] += 1
        if verdict is False:
            report.wrong.append(f"request {number}: {found} instead of {want}")
        return True

    async def _complete(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self._session.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response:
            return response.status, await response.json()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=Config().requests)
    parser.add_argument("--at-once", type=int, default=Config().at_once)
    parser.add_argument("--seed", type=int, default=Config().seed)
    parser.add_argument("--folder", type=Path, help="for logs; by default they are not kept")
    arguments = parser.parse_args()
    config = Config(requests=arguments.requests, at_once=arguments.at_once, seed=arguments.seed)
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as directory, small_servers(Path(directory) / "quiet"):
        report = run_killed_ranks(config, arguments.folder or Path(directory))
    print(report.text())
    return 1 if report.wrong or not report.ends["exact"] else 0


if __name__ == "__main__":
    sys.exit(main())

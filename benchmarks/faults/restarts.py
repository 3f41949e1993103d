"""Streams while every engine is restarted or killed in turn: how many fail, and how long engines are away.

    python -m benchmarks.faults.restarts rolling --streams 500     drain, end, start, add: one engine after the other
    python -m benchmarks.faults.restarts signal                    SIGTERM alone, and a process at the old address
    python -m benchmarks.faults.restarts kill --streams 100        SIGKILL, so many streams for each engine
    python -m benchmarks.faults.restarts up --streams 100          the same under `baton up`, which restarts engines

Every answer is compared with one engine's, token by token; of a failed stream, the tokens before its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from baton.bench.timed_stream import Streamed, stream_completion
from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import Case, make_cases
from baton.verify.sides import EngineSide
from benchmarks.deployment import BreakableDeployment
from benchmarks.faults.supervised import Supervised
from benchmarks.scrape import get_json

TARGET = "models/baton-demo-llama"
SPECULATIVE = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
_TOKEN = "t" * 32
_NUM_CASES = 24


@dataclass(slots=True)
class RestartReport:
    """`failures` by text. `wrong`: answers that differ. `away_s`: per engine, from its end until it is used again.
    `slowest_gap_s`: the longest time between two events of one stream.
    """

    how: str
    streams: int = 0
    wrong: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    away_s: dict[str, float] = field(default_factory=dict)
    ttfts_s: list[float] = field(default_factory=list)
    slowest_gap_s: float = 0.0
    decisions: str = ""
    recoveries: dict[str, int] = field(default_factory=dict)

    def table(self) -> str:
        ttfts = sorted(self.ttfts_s) or [float("nan")]
        away = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.away_s.items())
        return "\n".join(
            [
                f"{self.how}: {self.streams} streams, {sum(self.failures.values())} failed, {self.wrong} wrong",
                f"  failures {dict(self.failures)}",
                f"  TTFT p50 {statistics.median(ttfts):.2f} s, max {ttfts[-1]:.2f} s",
                f"  longest gap in a stream {self.slowest_gap_s:.2f} s",
                f"  seconds away: {away}",
                f"  {self.decisions}; recoveries {self.recoveries}",
            ]
        )


def run_restarts(
    how: str, streams: int = 500, concurrency: int = 4, prefill: int = 2, decode: int = 2, seed: int = 0
) -> RestartReport:
    """Run everything. All processes have ended when this returns. With `kill` and `up`, `streams` is per engine."""
    rng, params = random.Random(seed), SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    lengths = [rng.choice((5, 40, 130, 300)) + rng.randrange(16) for _ in range(_NUM_CASES)]
    cases = make_cases(Tokenizer.load(TARGET), lengths, params)
    engine = {"model": TARGET, "speculative_config": SPECULATIVE, "batch_invariant": True}
    want = [tuple(observed.token_ids) for observed in EngineSide(engine).answers(cases).observed]
    report = RestartReport(how)
    flags = ["--batch-invariant", "--speculative-config", json.dumps(SPECULATIVE)]
    if how == "up":
        flags += ["--max-local-prefill-length", "0"]  # every stream is handed off while both roles live
        with Supervised(TARGET, prefill, decode, flags) as supervised:
            asyncio.run(_UnderUp(report, supervised, cases, want, streams, concurrency).run())
        return report
    with tempfile.TemporaryDirectory(prefix="baton-restarts-") as directory:
        token = Path(directory) / "token"
        token.write_text(_TOKEN)
        token.chmod(0o600)
        with BreakableDeployment(
            TARGET,
            prefill,
            decode,
            engine_flags=flags,
            router_flags=["--admin-token-file", str(token)],
            shutdown_timeout_s=20.0,
        ) as deployment:
            asyncio.run(_Restarts(report, deployment, cases, want, streams, concurrency).run())
    return report


class _Streams:
    """Clients that stream continuously, `concurrency` at once, and compare."""

    def __init__(
        self, report: RestartReport, url: str, cases: list[Case], want: list[tuple[int, ...]], concurrency: int
    ) -> None:
        self._report, self._url, self._cases, self._want = report, url, cases, want
        self._concurrency = concurrency
        self._over = False

    async def run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            clients = [asyncio.create_task(self._client(number)) for number in range(self._concurrency)]
            await self._disturb()
            self._over = True
            await asyncio.gather(*clients)
            await self._finish()

    async def _disturb(self) -> None:
        raise NotImplementedError

    async def _finish(self) -> None:
        state = await get_json(self._session, f"{self._url}/status")
        self._report.decisions, self._report.recoveries = state["decisions"]["summary"], state["recoveries"]

    async def _reach(self, streams: int) -> None:
        while self._report.streams < streams:
            await asyncio.sleep(0.1)

    async def _engines(self) -> list[dict[str, object]]:
        engines: list[dict[str, object]] = (await get_json(self._session, f"{self._url}/status"))["engines"]
        return engines

    async def _healthy(self, url: str) -> None:
        while not any(engine["url"] == url and engine["healthy"] for engine in await self._engines()):
            await asyncio.sleep(0.05)

    async def _client(self, number: int) -> None:
        report = self._report
        while not self._over:
            case = (number * 7 + report.streams) % len(self._cases)
            params = self._cases[case].params
            body = {
                "prompt": list(self._cases[case].prompt_token_ids),
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "ignore_eos": params.ignore_eos,
                "seed": 0,
            }
            report.streams += 1
            answer = Streamed()
            try:
                await stream_completion(self._session, self._url, body, answer)
            except (BatonError, aiohttp.ClientError) as error:
                report.failures[f"{type(error).__name__}: {error}"] += 1
                report.wrong += tuple(answer.token_ids) != self._want[case][: len(answer.token_ids)]
                continue
            report.wrong += tuple(answer.token_ids) != self._want[case]
            report.ttfts_s.append(answer.ttft_s)
            gaps = (later - earlier for earlier, later in zip(answer.times_s, answer.times_s[1:], strict=False))
            report.slowest_gap_s = max([report.slowest_gap_s, *gaps])


class _UnderUp(_Streams):
    """Kills each engine of `baton up`."""

    def __init__(
        self,
        report: RestartReport,
        up: Supervised,
        cases: list[Case],
        want: list[tuple[int, ...]],
        streams: int,
        concurrency: int,
    ) -> None:
        super().__init__(report, up.url, cases, want, concurrency)
        self._up, self._each = up, streams

    async def _disturb(self) -> None:
        for number, (name, url) in enumerate(self._up.engines.items()):
            await asyncio.sleep(1.0)
            started, old = time.monotonic(), self._up.kill(name)
            while self._up.pids.get(name, old) == old:
                await asyncio.sleep(0.02)
            await self._healthy(url)
            self._report.away_s[name] = time.monotonic() - started
            await self._reach(self._each * (number + 1))


class _Restarts(_Streams):
    """Restarts each engine of a deployment as `report.how` says."""

    def __init__(
        self,
        report: RestartReport,
        deployment: BreakableDeployment,
        cases: list[Case],
        want: list[tuple[int, ...]],
        streams: int,
        concurrency: int,
    ) -> None:
        super().__init__(report, deployment.url, cases, want, concurrency)
        self._deployment, self._least = deployment, streams

    async def _disturb(self) -> None:
        names = [name for name in self._deployment.pids if name != "router"]
        urls = dict(zip(names, self._deployment.engine_urls, strict=True))
        share = self._least // len(names) if self._report.how != "kill" else self._least
        for number, name in enumerate(names):
            await asyncio.sleep(1.0)
            await getattr(self, f"_{self._report.how}")(name, urls[name])
            await self._reach(share * (number + 1))

    async def _rolling(self, name: str, url: str) -> None:
        await self._admin("drain", url=url)
        while any(engine["url"] == url for engine in await self._engines()):
            await asyncio.sleep(0.05)
        started = time.monotonic()
        self._deployment.terminate(name)
        await asyncio.to_thread(self._deployment.wait, name)
        await self._start(name)
        await self._admin("add", url=url, role=name.partition("-")[0])
        self._report.away_s[name] = time.monotonic() - started

    async def _signal(self, name: str, url: str) -> None:
        self._deployment.terminate(name)
        await asyncio.to_thread(self._deployment.wait, name)
        await self._back(name, url)

    async def _kill(self, name: str, url: str) -> None:
        self._deployment.kill(name)
        await self._back(name, url)

    async def _back(self, name: str, url: str) -> None:
        started = time.monotonic()
        await self._start(name)
        await self._healthy(url)
        self._report.away_s[name] = time.monotonic() - started

    async def _start(self, name: str) -> None:
        self._deployment.restart(name, wait=False)
        await asyncio.to_thread(self._deployment.await_ready, name)

    async def _admin(self, what: str, **body: str) -> None:
        url, headers = f"{self._deployment.url}/instances/{what}", {"Authorization": f"Bearer {_TOKEN}"}
        async with self._session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise BatonError(f"{what} of {body}: {await response.text()}")


def main() -> None:
    """Exit status 1 if a stream failed or differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=["rolling", "signal", "kill", "up"])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    given = parser.parse_args()
    report = run_restarts(given.how, given.streams, given.concurrency, given.prefill, given.decode)
    print(report.table())
    raise SystemExit(bool(report.failures or report.wrong))


if __name__ == "__main__":
    main()

"""`python -m baton.bench.chaos`: engines are killed and halted at random moments, and no answer may change.

A whole deployment of real processes serves streams whose tokens and logprobs one undisturbed engine has given before.
Meanwhile engines get SIGKILL, or SIGSTOP and later SIGCONT or SIGKILL, at seeded random moments, at most one of each
role at a time; what was killed is restarted at its port. At last the router is killed in the middle of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import aiohttp

from baton.bench.chaos_report import ChaosReport
from baton.bench.client import scrape, stream_completion
from baton.bench.demo import SPECULATIVE, TARGET
from baton.errors import BatonError
from baton.processes import Deployment
from baton.text import Tokenizer
from baton.verify.observe import Case, Observed, make_cases, observe_in_process
from baton.wire import Recovery, SamplingParams

FAULTS = ("kill", "stop, cont", "stop, kill")
# Longer than a lease, so that peers and router give the engine up, or so short that nobody notices.
LONG_STOP_S, SHORT_STOP_S = (5.5, 8.0), (0.1, 2.0)
REJOIN_LIMIT_S = 60.0
IDLE_LIMIT_S = 30.0
LOGPROB_TOLERANCE = 1e-4
IDLE = ("num_running", "num_waiting", "num_handoffs", "num_referenced_pages", "num_quarantined_pages")


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """What to do. `pause_s`: range of the time between two faults of one role, in seconds."""

    requests: int = 300
    concurrency: int = 4
    prefill: int = 2
    decode: int = 2
    seed: int = 0
    mode: str = "push"
    recovery: Recovery = "full"
    integrity: str = "off"
    pause_s: tuple[float, float] = (0.1, 1.5)


def run_chaos(config: ChaosConfig) -> ChaosReport:
    """Run it all; every process has ended when this returns."""
    cases = _cases(config)
    engine = {"model": TARGET, "speculative_config": SPECULATIVE, "batch_invariant": True}
    want = observe_in_process(engine, cases)
    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--batch-invariant", "--max-num-batched-tokens", "64"]
    flags += ["--recovery", config.recovery, "--integrity", config.integrity, "--kv-cache-memory", str(32 << 20)]
    router_flags = ["--kv-mode", config.mode, "--recovery", config.recovery]
    report = ChaosReport()
    with Deployment(TARGET, config.prefill, config.decode, engine_flags=flags, router_flags=router_flags) as deployment:
        chaos = _Chaos(config, deployment, cases, want, report)
        asyncio.run(chaos.run())
    segments = (path.name for path in Path("/dev/shm").glob("baton-*"))
    left = [name for name in segments if int(name.split("-")[1]) in chaos.pids]
    report.leaks += [f"/dev/shm/{name}" for name in left]
    return report


def _cases(config: ChaosConfig) -> list[Case]:
    rng = random.Random(config.seed)
    lengths = [rng.choice((3, 16, 47, 130, 300)) + rng.randrange(16) for _ in range(config.requests)]
    cases = make_cases(Tokenizer.load(TARGET), lengths, SamplingParams())
    return [Case(case.prompt_token_ids, _params(rng, number)) for number, case in enumerate(cases)]


def _params(rng: random.Random, number: int) -> SamplingParams:
    sampled = number % 3 != 0
    return SamplingParams(
        max_tokens=rng.choice((1, 24, 64, 120, 120)),
        temperature=0.9 if sampled else 0.0,
        seed=number,
        logprobs=1,
        presence_penalty=0.5 if number % 3 == 1 else 0.0,
        ignore_eos=number % 4 != 0,
    )


class _Chaos:
    """One run on one event loop, that of the thread which made the deployment."""

    def __init__(
        self,
        config: ChaosConfig,
        deployment: Deployment,
        cases: list[Case],
        want: list[Observed],
        report: ChaosReport,
    ) -> None:
        self._config, self._deployment, self._report = config, deployment, report
        self._cases, self._want = cases, want
        self._rng = random.Random(config.seed + 1)
        self.pids = set(deployment.pids.values())

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=180.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            started = time.monotonic()
            await self._stream_under_faults()
            self._report.elapsed_s = time.monotonic() - started
            await self._await_idle("after the streams")
            for name, url in self._engines().items():
                await self._count_recoveries(name, url)
            await self._count_router()
            await self._kill_router()

    async def _stream_under_faults(self) -> None:
        report, slots = self._report, asyncio.Semaphore(self._config.concurrency)

        async def one(number: int) -> None:
            async with slots:
                started = time.monotonic()
                outcome = await self._check(number)
                report.slowest_s = max(report.slowest_s, time.monotonic() - started)
                report.num_requests += 1
                report.num_exact += outcome is None

        over = asyncio.Event()
        faults = [asyncio.create_task(self._break(role, over)) for role in ("prefill", "decode")]
        try:
            await asyncio.gather(*(one(number) for number in range(len(self._cases))))
        finally:
            over.set()
            await asyncio.gather(*faults)

    async def _check(self, number: int) -> str | None:
        """None when the stream equals the undisturbed engine's answer."""
        case, want = self._cases[number], self._want[number]
        params = case.params
        body: dict[str, Any] = {
            "prompt": list(case.prompt_token_ids),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "logprobs": params.logprobs,
            "presence_penalty": params.presence_penalty,
            "ignore_eos": params.ignore_eos,
        }
        try:
            have = await stream_completion(self._session, self._deployment.url, body)
        except (BatonError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            name = f"{type(error).__name__}: {error}"[:200]
            self._report.errors[name] += 1
            return name
        assert want.logprobs is not None
        difference = None
        if tuple(have.token_ids) != want.token_ids or have.finish_reason != want.finish_reason:
            difference = f"{have.token_ids} {have.finish_reason}, not {want.token_ids} {want.finish_reason}"
        elif len(have.logprobs) != len(want.logprobs) or any(
            abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(have.logprobs, want.logprobs, strict=True)
        ):
            difference = f"logprobs {have.logprobs}, not {want.logprobs}"
        elif tuple(have.accepted) != want.accepted:
            difference = f"accepted {have.accepted}, not {want.accepted}"
        if difference is not None:
            self._report.different.append(f"request {number}: {difference}")
        return difference

    # ------------------------------------------------------------ faults

    async def _break(self, role: str, over: asyncio.Event) -> None:
        """Break engines of one role, one at a time, until `over`; at the end all of them run."""
        rng = random.Random(f"{self._config.seed} {role}")
        names = [name for name in self._deployment.pids if name.startswith(role)]
        while not over.is_set():
            await asyncio.sleep(rng.uniform(*self._config.pause_s))
            name, kind = rng.choice(names), rng.choice(FAULTS)
            stop_s = rng.uniform(*rng.choice((LONG_STOP_S, SHORT_STOP_S)))
            if over.is_set():
                return
            self._report.faults[role, kind] += 1
            if kind == "kill":
                await self._count_recoveries(name, self._engines()[name])
                self._deployment.kill(name)
            else:
                self._deployment.stop(name)
                await asyncio.sleep(stop_s)
                if kind == "stop, cont":
                    self._deployment.cont(name)
                else:
                    self._deployment.kill(name)
            if kind != "stop, cont":
                # From this thread, which outlives it: an engine ends with the thread that started it.
                self._deployment.restart(name, wait=False)
                self.pids.add(self._deployment.pids[name])
                await asyncio.to_thread(self._deployment.await_ready, name)
            started = time.monotonic()
            await self._await_healthy(name)
            if kind != "stop, cont":
                self._report.rejoined_s.append(time.monotonic() - started)

    def _engines(self) -> dict[str, str]:
        names = [name for name in self._deployment.pids if name != "router"]
        return dict(zip(names, self._deployment.engine_urls, strict=True))

    async def _await_healthy(self, name: str) -> None:
        url, deadline = self._engines()[name], time.monotonic() + REJOIN_LIMIT_S
        while True:
            status = await self._get(f"{self._deployment.url}/status")
            if any(engine["url"] == url and engine["healthy"] for engine in status["engines"]):
                return
            if time.monotonic() > deadline:
                raise BatonError(f"{name} did not rejoin: {status}")
            await asyncio.sleep(0.1)

    async def _kill_router(self) -> None:
        """Cut streams by the router's death; their engines must free them, and serve its successor."""
        report = self._report
        numbers = [n for n, case in enumerate(self._cases) if case.params.max_tokens > 60][:8]
        errors_before = Counter(report.errors)
        streams = [asyncio.create_task(self._check(number)) for number in numbers]
        await asyncio.sleep(self._rng.uniform(0.1, 0.3))
        self._deployment.kill("router")
        outcomes = await asyncio.gather(*streams)
        report.num_orphans = sum(outcome is not None for outcome in outcomes)
        report.errors = errors_before
        started = time.monotonic()
        await self._await_idle("after the router's death")
        report.orphans_freed_s = time.monotonic() - started
        self._deployment.restart("router", wait=False)
        await asyncio.to_thread(self._deployment.await_ready, "router")
        for name in self._engines():
            await self._await_healthy(name)
        outcomes = await asyncio.gather(*(self._check(number) for number in numbers))
        report.num_after = len(numbers)
        report.num_exact_after = sum(outcome is None for outcome in outcomes)
        await self._await_idle("after the new router's streams")

    # ------------------------------------------------------------ figures

    async def _await_idle(self, when: str) -> None:
        """Note as leaks what engines still hold after a while."""
        deadline = time.monotonic() + IDLE_LIMIT_S
        while True:
            held = {}
            for name, url in self._engines().items():
                load = await self._get(f"{url}/inference/v1/load")
                held.update({f"{name} {key} {when}": load[key] for key in IDLE if load[key]})
            if not held:
                return
            if time.monotonic() > deadline:
                self._report.leaks += [f"{what}: {value}" for what, value in held.items()]
                return
            await asyncio.sleep(0.1)

    async def _count_recoveries(self, name: str, url: str) -> None:
        """An engine's counters die with it."""
        for rung in ("retry", "recompute"):
            count = await scrape(self._session, url, "baton:recoveries", rung=rung)
            self._report.recoveries["engine", rung] += int(count)

    async def _count_router(self) -> None:
        status = await self._get(f"{self._deployment.url}/status")
        for rung, count in status["recoveries"].items():
            self._report.recoveries["router", rung] += count

    async def _get(self, url: str) -> Any:
        async with self._session.get(url) as response:
            return await response.json()


def main() -> int:
    """Return the exit status: 0 when every stream was exact and nothing was left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ChaosConfig()
    parser.add_argument("--requests", type=int, default=default.requests)
    parser.add_argument("--concurrency", type=int, default=default.concurrency)
    parser.add_argument("--prefill", type=int, default=default.prefill)
    parser.add_argument("--decode", type=int, default=default.decode)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--mode", choices=("push", "pull"), default=default.mode)
    parser.add_argument("--recovery", choices=get_args(Recovery), default=default.recovery)
    parser.add_argument("--integrity", choices=("off", "sampled", "full"), default=default.integrity)
    config = ChaosConfig(**vars(parser.parse_args()))
    print(f"{config.prefill} prefill and {config.decode} decode engines, {config.requests} streams", flush=True)
    report = run_chaos(config)
    print(report.table())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.faults.chaos`: engines are killed and stopped at random moments, and no answer may change.

A deployment of real processes serves streams whose tokens and logprobs are known from one undisturbed engine. Meanwhile
engines get SIGKILL, or SIGSTOP and later SIGCONT or SIGKILL, at seeded random moments or right after a session with a
peer began, at most one per role at a time; a killed engine is restarted at its port. At the end a router is killed
during streams. `--kv-cache-memory 2500000` leaves space for one or two requests per engine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import aiohttp

from baton.bench.timed_stream import stream_completion
from baton.errors import BatonError, EngineLostError
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import Case, Observed, make_cases
from baton.verify.sides import EngineSide
from baton.wire import Recovery
from benchmarks.demo import MODELS
from benchmarks.deployment import BreakableDeployment
from benchmarks.faults.injected import (
    FAULTS,
    HALT_DATA_RANK,
    KILL_DATA_RANK,
    KILL_RANK,
    KILL_RANK_0,
    Breaker,
    await_healthy,
    count_recoveries,
)
from benchmarks.faults.report import ChaosReport
from benchmarks.scrape import IDLE_LIMIT_S, get_json, held

# Upper limit for repeating the cases, if a fast machine serves them all before each role has had its faults.
MOST_ROUNDS = 50
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """`kv_cache_memory`: bytes per engine. `pause_s`: range of the time between two faults of one role, in seconds.
    Each role gets `least_faults`, with more streams if necessary. `experts`: use a model with experts, which
    data-parallel ranks share.
    """

    requests: int = 300
    concurrency: int = 4
    prefill: int = 2
    decode: int = 2
    routers: int = 1
    transport: str = "shm"
    prefix_store: bool = False
    kv_cache_memory: int = 32 << 20
    seed: int = 0
    mode: str = "push"
    recovery: Recovery = "full"
    integrity: str = "off"
    pause_s: tuple[float, float] = (0.1, 1.5)
    least_faults: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    experts: bool = False
    ranks_only: bool = False

    @property
    def target(self) -> str:
        """The model's directory. The drafter's is beside it."""
        return str(MODELS / ("baton-demo-deepseek" if self.experts else "baton-demo-llama"))

    @property
    def speculative(self) -> dict[str, Any]:
        head = "baton-demo-deepseek-eagle3" if self.experts else "baton-demo-eagle3"
        return {"method": "eagle3", "model": str(MODELS / head), "num_speculative_tokens": 3}


def run_chaos(config: ChaosConfig) -> ChaosReport:
    """Run everything. All processes have ended when this returns."""
    cases = _cases(config)
    ranks = config.tensor_parallel_size
    target, speculative = config.target, config.speculative
    engine = {"model": target, "speculative_config": speculative, "batch_invariant": True, "reduction_slices": ranks}
    want = EngineSide(engine).answers(cases).observed
    flags = ["--speculative-config", json.dumps(speculative), "--batch-invariant", "--max-num-batched-tokens", "64"]
    flags += ["--recovery", config.recovery, "--integrity", config.integrity]
    flags += ["--kv-cache-memory", str(config.kv_cache_memory), "--tensor-parallel-size", str(ranks)]
    router_flags = ["--kv-mode", config.mode, "--recovery", config.recovery]
    report = ChaosReport(recovery=config.recovery)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as directory:
        if config.prefix_store:
            flags += ["--kv-transfer-config", json.dumps({"prefix_store": f"file://{directory}/store"})]
        # Temporary files that processes leave behind are found here.
        left_by_children = Path(directory) / "tmp"
        left_by_children.mkdir()
        with (
            patch.dict(os.environ, {"TMPDIR": str(left_by_children), "PYTHONFAULTHANDLER": "1"}),
            BreakableDeployment(
                target,
                config.prefill,
                config.decode,
                engine_flags=flags,
                kv_transport=config.transport,
                router_flags=router_flags,
                routers=config.routers,
                data_ranks=dict.fromkeys(("prefill", "decode"), config.data_parallel_size),
            ) as deployment,
        ):
            chaos = _Chaos(config, deployment, cases, want, report)
            asyncio.run(chaos.run())
        report.leaks += [f"temporary {path.name}" for path in left_by_children.iterdir()]
    segments = (path.name for path in Path("/dev/shm").glob("baton-*"))
    left = [name for name in segments if int(name.split("-")[1]) in chaos.pids]
    report.leaks += [f"/dev/shm/{name}" for name in left]
    return report


def _faults(config: ChaosConfig) -> tuple[str, ...]:
    if config.data_parallel_size > 1:
        # A stopped engine process would be the parent of the data-parallel ranks, which computes nothing.
        return (KILL_DATA_RANK,) if config.ranks_only else ("kill", KILL_DATA_RANK, HALT_DATA_RANK)
    if config.ranks_only:
        return (KILL_RANK, KILL_RANK_0)
    return FAULTS if config.tensor_parallel_size == 1 else (*FAULTS, KILL_RANK, KILL_RANK_0)


def _cases(config: ChaosConfig) -> list[Case]:
    rng = random.Random(config.seed)
    # A prefix store keeps spans of 256 tokens.
    some = (16, 130, 300, 600) if config.prefix_store else (3, 16, 47, 130, 300)
    lengths = [rng.choice(some) + rng.randrange(16) for _ in range(config.requests)]
    cases = make_cases(Tokenizer.load(config.target), lengths, SamplingParams())
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
    """One run on the event loop of the thread that made the deployment."""

    def __init__(
        self,
        config: ChaosConfig,
        deployment: BreakableDeployment,
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
            for url in self._deployment.engine_urls:
                await count_recoveries(self._session, self._report, url)
            await self._count_routers()
            await self._kill_router()

    async def _stream_under_faults(self) -> None:
        """Stream all cases, and repeat them until each role has had its faults."""
        config, report, over = self._config, self._report, asyncio.Event()
        breakers = [
            Breaker(
                role,
                random.Random(f"{config.seed} {role}"),
                self._session,
                self._deployment,
                report,
                self.pids,
                _faults(config),
            )
            for role in ("prefill", "decode")
        ]
        numbers = itertools.count()

        def enough(number: int) -> bool:
            broken = all(breaker.num_faults >= config.least_faults for breaker in breakers)
            failed = any(task.done() for task in faults)
            return number >= len(self._cases) * (1 if broken or failed else MOST_ROUNDS)

        async def stream() -> None:
            while not enough(number := next(numbers)):
                started = time.monotonic()
                outcome = await self._check(number % len(self._cases))
                report.slowest_s = max(report.slowest_s, time.monotonic() - started)
                report.num_requests += 1
                report.num_exact += outcome is None

        faults = [asyncio.create_task(breaker.run(config.pause_s, over)) for breaker in breakers]
        try:
            await asyncio.gather(*(stream() for _ in range(config.concurrency)))
        finally:
            over.set()
            await asyncio.gather(*faults)

    async def _check(self, number: int) -> str | None:
        """Returns None if the stream equals the undisturbed engine's answer."""
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
        urls = self._deployment.router_urls
        try:
            have = await stream_completion(self._session, urls[number % len(urls)], body)
        except EngineLostError as error:
            self._report.errors[str(error)[:200]] += 1
            return str(error)
        except BatonError as error:
            self._report.refusals[str(error)[:200]] += 1
            return str(error)
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

    # ------------------------------------------------------------ the death of a router

    async def _kill_router(self) -> None:
        """Kill a router during streams. Engines must free its streams and serve its successor, and streams of other
        routers go on.
        """
        report, num_routers = self._report, len(self._deployment.router_urls)
        numbers = [n for n, case in enumerate(self._cases) if case.params.max_tokens > 60][: 8 * num_routers]
        mine = [n for n in numbers if n % num_routers == 0]
        before = Counter(report.errors), Counter(report.refusals)
        streams = {number: asyncio.create_task(self._check(number)) for number in numbers}
        await asyncio.sleep(self._rng.uniform(0.1, 0.3))
        self._deployment.kill("router")
        outcomes = dict(zip(numbers, await asyncio.gather(*streams.values()), strict=True))
        report.num_orphans = sum(outcomes[number] is not None for number in mine)
        others = [outcome for number, outcome in outcomes.items() if number not in mine]
        report.num_beside, report.num_exact_beside = len(others), sum(outcome is None for outcome in others)
        report.errors, report.refusals = before
        started = time.monotonic()
        await self._await_idle("after the router's death")
        report.orphans_freed_s = time.monotonic() - started
        self._deployment.restart("router", wait=False)
        await asyncio.to_thread(self._deployment.await_ready, "router")
        for name in self._deployment.engines_urls:
            await await_healthy(self._session, self._deployment, name)
        found = await asyncio.gather(*(self._check(number) for number in numbers))
        report.num_after = len(numbers)
        report.num_exact_after = sum(outcome is None for outcome in found)
        await self._await_idle("after the new router's streams")

    # ------------------------------------------------------------ measurements

    async def _await_idle(self, when: str) -> None:
        """Report as leaks what engines still hold after `IDLE_LIMIT_S`."""
        deadline = time.monotonic() + IDLE_LIMIT_S
        while True:
            leaks = []
            for name, urls in self._deployment.engines_urls.items():
                for url in urls:
                    found = await held(self._session, url)
                    leaks += [f"{name} {key} {when}: {value}" for key, value in found.items()]
            if not leaks:
                return
            if time.monotonic() > deadline:
                self._report.leaks += leaks
                return
            await asyncio.sleep(0.1)

    async def _count_routers(self) -> None:
        for url in self._deployment.router_urls:
            status = await get_json(self._session, f"{url}/status")
            for rung, count in status["recoveries"].items():
                self._report.recoveries["router", rung] += count


def main() -> int:
    """Returns the exit status: 0 if every stream was exact and nothing was left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ChaosConfig()
    parser.add_argument("--requests", type=int, default=default.requests)
    parser.add_argument("--concurrency", type=int, default=default.concurrency)
    parser.add_argument("--prefill", type=int, default=default.prefill)
    parser.add_argument("--decode", type=int, default=default.decode)
    parser.add_argument("--routers", type=int, default=default.routers)
    parser.add_argument("--transport", default=default.transport, help="shm, nixl, ... or a URI")
    parser.add_argument("--prefix-store", action="store_true")
    parser.add_argument("--kv-cache-memory", type=int, default=default.kv_cache_memory, help="bytes per engine")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--mode", choices=("push", "pull"), default=default.mode)
    parser.add_argument("--recovery", choices=get_args(Recovery), default=default.recovery)
    parser.add_argument("--integrity", choices=("off", "sampled", "full"), default=default.integrity)
    parser.add_argument("--tensor-parallel-size", type=int, default=default.tensor_parallel_size)
    parser.add_argument("--data-parallel-size", type=int, default=default.data_parallel_size)
    parser.add_argument("--experts", action="store_true", help="of a model with experts, and latents")
    parser.add_argument("--ranks-only", action="store_true", help="kill single ranks, and do nothing else to engines")
    parser.add_argument("--least-faults", type=int, default=default.least_faults, help="of each role")
    config = ChaosConfig(**vars(parser.parse_args()))
    engines = f"{config.prefill} prefill and {config.decode} decode engines over {config.transport}"
    print(f"{engines}, {config.routers} routers, {config.requests} streams", flush=True)
    report = run_chaos(config)
    print(report.table())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())

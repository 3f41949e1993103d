"""`python -m benchmarks.faults.soak`: many requests at moderate load, some aborted in mid-stream. Does anything grow?

Each answer must be exact. After each tenth the load pauses, and every process is measured: its own memory, descriptors,
threads, and the CPU time of the tenth's requests, which shows a slowdown even on a busy machine. Every engine must have
released all pages, requests and handoffs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from baton.bench.timed_stream import stream_completion
from baton.errors import BatonError
from baton.openai.client import OpenAIClient
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.transports.process import stat_of
from baton.verify.observe import Case, Observed, make_cases
from baton.verify.sides import EngineSide
from benchmarks.demo import SPECULATIVE, TARGET
from benchmarks.deployment import BreakableDeployment
from benchmarks.scrape import own_mib, process_status, until_idle

TENTHS = 10


@dataclass(frozen=True, slots=True)
class SoakConfig:
    """Each of the `clients` sends one request after the other. The share `aborted` is left after the first event."""

    requests: int = 24_000
    clients: int = 3
    aborted: float = 0.1
    cases: int = 24
    max_tokens: int = 8


@dataclass(frozen=True, slots=True)
class Figures:
    """A process at rest. `mib`: anonymous memory; `cpu_s`: CPU time since its start."""

    mib: float
    descriptors: int
    threads: int
    cpu_s: float


@dataclass(slots=True)
class SoakReport:
    """Per tenth: the median time of a whole answer in seconds, CPU seconds of each process per request, and each
    process's figures at its end.
    """

    num_exact: int = 0
    num_left: int = 0
    p50_s: list[float] = field(default_factory=list)
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    figures: list[dict[str, Figures]] = field(default_factory=list)

    def table(self) -> str:
        lines = [f"{self.num_exact} exact, {self.num_left} left in mid-stream"]
        for number, (p50, cpu_s, figures) in enumerate(zip(self.p50_s, self.cpu_s, self.figures, strict=True), 1):
            each = "; ".join(
                f"{name} {1e3 * cpu_s[name]:.2f} ms CPU {f.mib:.0f} MiB {f.descriptors} fd {f.threads} thr"
                for name, f in figures.items()
            )
            lines.append(f"tenth {number}: p50 {1e3 * p50:.1f} ms; {each}")
        first, last = (sum(tenth.values()) for tenth in (self.cpu_s[0], self.cpu_s[-1]))
        ratios = f"p50 {self.p50_s[-1] / self.p50_s[0]:.3f}, CPU time of a request {last / first:.3f}"
        return "\n".join([*lines, f"last tenth over first: {ratios}"])


def run_soak(config: SoakConfig) -> SoakReport:
    """Run everything. All processes have ended when this returns. Raises `BatonError` for a wrong answer, or if an
    engine does not become idle.
    """
    params = SamplingParams(max_tokens=config.max_tokens, temperature=0.0, ignore_eos=True)
    cases = make_cases(Tokenizer.load(TARGET), [5 + 11 * i for i in range(config.cases)], params)
    engine = {"model": TARGET, "speculative_config": SPECULATIVE, "batch_invariant": True}
    want = EngineSide(engine).answers(cases).observed
    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--batch-invariant"]
    with BreakableDeployment(TARGET, engine_flags=flags) as deployment:
        return asyncio.run(_Soak(config, deployment, cases, want).run())


class _Soak:
    def __init__(
        self, config: SoakConfig, deployment: BreakableDeployment, cases: Sequence[Case], want: Sequence[Observed]
    ) -> None:
        self._config, self._deployment, self._cases, self._want = config, deployment, cases, want
        self._report = SoakReport()
        self._random = random.Random(0)

    async def run(self) -> SoakReport:
        timeout = aiohttp.ClientTimeout(total=120.0)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            number = self._config.requests // TENTHS
            for _ in range(TENTHS):
                times: list[float] = []
                numbers = iter(range(number))
                before = {name: _cpu_s(pid) for name, pid in self._deployment.pids.items()}
                await asyncio.gather(*(self._client(numbers, times) for _ in range(self._config.clients)))
                await until_idle(self._session, self._deployment.engine_urls)
                self._report.p50_s.append(statistics.median(times))
                figures = {name: _figures(pid) for name, pid in self._deployment.pids.items()}
                self._report.figures.append(figures)
                self._report.cpu_s.append({name: (f.cpu_s - before[name]) / number for name, f in figures.items()})
        return self._report

    async def _client(self, numbers: Iterator[int], times: list[float]) -> None:
        for number in numbers:
            index = number % len(self._cases)
            case = self._cases[index]
            body = {"prompt": list(case.prompt_token_ids), "max_tokens": case.params.max_tokens}
            body |= {"temperature": 0.0, "ignore_eos": True}
            if self._random.random() < self._config.aborted:
                async for _ in OpenAIClient(self._session, self._deployment.url).stream(body):
                    break
                self._report.num_left += 1
                continue
            began = time.perf_counter()
            streamed = await stream_completion(self._session, self._deployment.url, body)
            times.append(time.perf_counter() - began)
            if tuple(streamed.token_ids) != self._want[index].token_ids:
                raise BatonError(f"case {index}: {streamed.token_ids}, expected {self._want[index].token_ids}")
            self._report.num_exact += 1


def _figures(pid: int) -> Figures:
    status = process_status(pid)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Figures(own_mib(status), descriptors, int(status["Threads"]), _cpu_s(pid))


def _cpu_s(pid: int) -> float:
    fields = stat_of(pid)
    assert fields is not None, f"process {pid} has ended"
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    config = SoakConfig()
    parser.add_argument("--requests", type=int, default=config.requests)
    parser.add_argument("--clients", type=int, default=config.clients)
    args = parser.parse_args()
    print(run_soak(SoakConfig(requests=args.requests, clients=args.clients)).table())


if __name__ == "__main__":
    main()

"""`python -m benchmarks.faults.overload`: far more requests at once than fit, then clients that cost too much.

Each answer must be exact (the tokens of one idle engine) or 429, memory must be bounded, and soon after the end all
must be as before. Then streams are timed with and without hostile clients. At the end, equally many requests, none of
them refused, are timed all at once, alone and beside streams that nobody reads and bodies that decompress to gigabytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.bench.timed_stream import Streamed, stream_completion
from baton.errors import BatonError, OverloadedError
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import Case, Observed, make_cases
from baton.verify.sides import EngineSide
from benchmarks.demo import SPECULATIVE, TARGET
from benchmarks.deployment import BreakableDeployment
from benchmarks.faults.hostile import hostile_clients, unread_and_deflated
from benchmarks.scrape import own_mib, process_status, until_idle

LEAVE_EVERY_S = 0.1
RETRY_AFTER_S = 1.0  # as the 429 response says


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """`requests` at once on engines that run `room` requests, with queues of `queued`. Then `streams` are timed, each
    client's one after the other, beside `silent`, `leaving` and `slow` clients; and `requests` at once beside `unread`
    streams of `unread_tokens` and `deflated` bodies, if any.
    """

    requests: int = 500
    room: int = 8
    queued: int = 64
    cases: int = 24
    max_tokens: int = 48
    streams: int = 48
    silent: int = 64
    leaving: int = 100
    slow: int = 20
    unread: int = 80
    unread_tokens: int = 96
    deflated: int = 8


@dataclass(slots=True)
class OverloadReport:
    """`memory`: by process, MiB of its own before, at most, and after. `tpot_s`: medians without and with hostile
    clients. `together_s`: times of the answers, `alone` and `beside` unread streams and deflated bodies.
    """

    num_exact: int = 0
    num_refused: int = 0
    others: list[str] = field(default_factory=list)
    memory: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    recovered_s: float = 0.0
    tpot_s: tuple[float, float] = (0.0, 0.0)
    together_s: dict[str, list[float]] = field(default_factory=dict)

    def table(self) -> str:
        lines = [f"{self.num_exact} exact, {self.num_refused} refused with 429, {len(self.others)} others"]
        lines += self.others[:5]
        lines += [
            f"{name}: {before:.0f} MiB, at most {peak:.0f}, then {after:.0f}"
            for name, (before, peak, after) in self.memory.items()
        ]
        quiet, beside = (1e3 * tpot for tpot in self.tpot_s)
        lines += [f"all as before {self.recovered_s:.2f} s after the last answer"]
        lines += [f"TPOT {quiet:.2f} ms, beside hostile clients {beside:.2f} ms: {beside / quiet:.2f}"]
        for what, of in (("median", statistics.median), ("last", max)):
            alone, hard = (of(self.together_s[name]) for name in ("alone", "beside"))
            lines += [
                f"{what} of all answers {alone:.2f} s, beside unread and deflated {hard:.2f} s: {hard / alone:.2f}"
            ]
        return "\n".join(lines)


def run_overload(config: OverloadConfig) -> OverloadReport:
    """Run everything. All processes have ended when this returns. Raises `BatonError` if engines do not become idle."""
    params = SamplingParams(max_tokens=config.max_tokens, temperature=0.0, ignore_eos=True)
    cases = make_cases(Tokenizer.load(TARGET), [5 + 17 * i for i in range(config.cases)], params)
    engine = {"model": TARGET, "speculative_config": SPECULATIVE, "batch_invariant": True}
    want = EngineSide(engine).answers(cases).observed
    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--batch-invariant", "--max-num-seqs", str(config.room)]
    queue = ["--max-queued-requests", str(config.queued)]
    report = OverloadReport()
    with BreakableDeployment(TARGET, engine_flags=[*flags, *queue], router_flags=queue) as deployment:
        asyncio.run(_Overload(config, deployment, cases, want, report).run())
    if not config.unread and not config.deflated:
        return report
    with BreakableDeployment(TARGET, engine_flags=flags) as deployment:
        asyncio.run(_Overload(config, deployment, cases, want, report).run_together())
    return report


class _Overload:
    def __init__(
        self,
        config: OverloadConfig,
        deployment: BreakableDeployment,
        cases: Sequence[Case],
        want: Sequence[Observed],
        report: OverloadReport,
    ) -> None:
        self._config, self._deployment, self._cases, self._want = config, deployment, cases, want
        self._report = report

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=600.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            await self._ask(0)  # first-use loading is not part of the measurement
            yield

    async def run(self) -> None:
        async with self._connected():
            await self._burst()
            quiet = await self._timed()
            body = self._body(len(self._cases) - 1)
            config = self._config
            async with hostile_clients(
                self._deployment.url, body, config.silent, config.leaving, config.slow, LEAVE_EVERY_S
            ):
                beside = await self._timed()
            self._report.tpot_s = quiet, beside
            await until_idle(self._session, self._deployment.engine_urls)

    async def run_together(self) -> None:
        config, times = self._config, self._report.together_s
        body = {**self._body(0), "max_tokens": config.unread_tokens, "logprobs": 20}
        async with self._connected():
            times["alone"] = await self._all_at_once()
            async with unread_and_deflated(self._deployment.url, body, config.unread, config.deflated):
                times["beside"] = await self._all_at_once()
            await until_idle(self._session, self._deployment.engine_urls)

    async def _all_at_once(self) -> list[float]:
        """Send all requests at once. Returns the seconds until each was answered; each answer must be exact."""

        async def ask(number: int) -> float:
            begin = time.monotonic()
            await self._ask(number % len(self._cases))
            return time.monotonic() - begin

        return await asyncio.gather(*(ask(number) for number in range(self._config.requests)))

    async def _burst(self) -> None:
        report = self._report
        before = peak = self._memory()
        over = asyncio.Event()

        async def watch() -> None:
            nonlocal peak
            while not over.is_set():
                now = self._memory()
                peak = {name: max(mib, now[name]) for name, mib in peak.items()}
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(self._count(number) for number in range(self._config.requests)))
        ended = time.monotonic()
        assert len(answers) == report.num_exact + report.num_refused + len(report.others)
        await until_idle(self._session, self._deployment.engine_urls)
        await self._ask(0)
        report.recovered_s = time.monotonic() - ended
        over.set()
        await watching
        after = self._memory()
        report.memory = {name: (before[name], peak[name], after[name]) for name in before}

    async def _count(self, number: int) -> None:
        try:
            await self._ask(number % len(self._cases))
            self._report.num_exact += 1
        except OverloadedError:
            self._report.num_refused += 1
        except BatonError as error:
            self._report.others.append(str(error)[:300])

    async def _timed(self) -> float:
        """The median TPOT of streams, `room` at once; each answer must be exact."""
        numbers = iter(range(self._config.streams))
        tpots: list[float] = []

        async def client() -> None:
            for number in numbers:
                streamed = await self._persist(number % len(self._cases))
                tpots.append((streamed.times_s[-1] - streamed.times_s[0]) / (len(streamed.times_s) - 1))

        await asyncio.gather(*(client() for _ in range(self._config.room)))
        return statistics.median(tpots)

    async def _persist(self, index: int) -> Streamed:
        """Retry until the request is accepted."""
        while True:
            with contextlib.suppress(OverloadedError):
                return await self._ask(index)
            await asyncio.sleep(RETRY_AFTER_S)

    async def _ask(self, index: int) -> Streamed:
        """Raises `BatonError` if the answer differs from the idle engine's."""
        streamed = await stream_completion(self._session, self._deployment.url, self._body(index))
        if tuple(streamed.token_ids) != self._want[index].token_ids:
            raise BatonError(f"case {index}: {streamed.token_ids}, expected {self._want[index].token_ids}")
        return streamed

    def _body(self, index: int) -> dict[str, Any]:
        case = self._cases[index]
        params = {"max_tokens": case.params.max_tokens, "temperature": 0.0, "ignore_eos": True}
        return {"prompt": list(case.prompt_token_ids), **params}

    def _memory(self) -> dict[str, float]:
        """MiB of memory that each process has for itself."""
        return {name: own_mib(process_status(pid)) for name, pid in self._deployment.pids.items()}


def main() -> int:
    """Returns 0 if every answer was exact or 429."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = OverloadConfig()
    for name in OverloadConfig.__slots__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    report = run_overload(OverloadConfig(**vars(parser.parse_args())))
    print(report.table())
    return 1 if report.others else 0


if __name__ == "__main__":
    sys.exit(main())

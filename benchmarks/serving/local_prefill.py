"""The cost of computing a prompt on the decode engine against handing it off: TTFT, and the decodes meanwhile.

    python -m benchmarks.serving.local_prefill [MODEL]

For each length, prompts that no cache holds are sent in turn with `kv_mode` (handed off) and without (computed by the
decode engine). Then the same while two streams decode. At the end, a prompt that the decode engine holds, with the
prefill engine running and stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from dataclasses import dataclass, field

import aiohttp

from baton.bench.timed_stream import Streamed, stream_completion
from benchmarks.deployment import BreakableDeployment

TARGET = "models/baton-demo-llama"
LENGTHS = (16, 32, 64, 128, 256, 512)
_IDLE, _BESIDE, _PAUSE_S = 9, 12, 0.1
_WAYS = ("local", "handoff")


@dataclass(slots=True)
class LocalReport:
    """Milliseconds by length and way: `ttft` of single prompts, `gaps` between events of streams beside them."""

    ttft: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    gaps: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    alone: list[float] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=dict)

    def table(self) -> str:
        """Medians, and the 99th percentile of gaps."""
        lines = [f"gaps without arrivals: p50 {_at(self.alone, 50):.2f}, p99 {_at(self.alone, 99):.2f} ms"]
        lines.append("tokens  TTFT local, handed off   gap p50 local, handed off   gap p99 local, handed off (ms)")
        for length in LENGTHS:
            cells = [f"{length:6d}"]
            for table, percent in ((self.ttft, 50), (self.gaps, 50), (self.gaps, 99)):
                cells += [f"{_at(table[length, way], percent):8.2f}" for way in _WAYS]
            lines.append("  ".join(cells))
        for name, found in self.held.items():
            text = f"TTFT of a held prompt of 512 tokens, prefill engine {name}: "
            lines.append(text + f"p50 {_at(found, 50):.2f}, range {min(found):.2f} to {max(found):.2f} ms")
        return "\n".join(lines)


def _at(found: list[float], percent: int) -> float:
    return statistics.quantiles(found, n=100, method="inclusive")[percent - 1]


class _Run:
    def __init__(self, deployment: BreakableDeployment, report: LocalReport) -> None:
        self._deployment, self._report, self._rng = deployment, report, random.Random(0)

    async def run(self) -> None:
        async with aiohttp.ClientSession() as self._session:
            for way in _WAYS * 2:
                await self._ask(self._prompt(64), way)
            for length in LENGTHS:
                for _ in range(_IDLE):
                    for way in _WAYS:
                        found = self._report.ttft.setdefault((length, way), [])
                        found.append((await self._ask(self._prompt(length), way)).ttft_s * 1e3)
            self._report.alone = await self._beside(0, "local")
            for length in LENGTHS:
                for way in _WAYS:
                    self._report.gaps[length, way] = await self._beside(length, way)
            await self._held()

    async def _held(self) -> None:
        prompt = self._prompt(512)
        await self._ask(prompt, "handoff")
        for name in ("running", "stopped"):
            if name == "stopped":
                self._deployment.stop("prefill-0")
            answers = [await self._ask(prompt, "local") for _ in range(_IDLE)]
            self._report.held[name] = [answer.ttft_s * 1e3 for answer in answers]
        self._deployment.cont("prefill-0")

    async def _beside(self, length: int, way: str) -> list[float]:
        """Milliseconds between the events of two streams that decode while prompts arrive."""
        streams = [asyncio.create_task(self._ask(self._prompt(20), "local", 250)) for _ in range(2)]
        await asyncio.sleep(0.2)
        if length:
            asked = []
            for _ in range(_BESIDE):
                asked.append(asyncio.create_task(self._ask(self._prompt(length), way)))
                await asyncio.sleep(_PAUSE_S)
            await asyncio.gather(*asked)
        gaps = []
        for answer in await asyncio.gather(*streams):
            times = sorted(set(answer.times_s))
            gaps += [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
        return gaps

    async def _ask(self, prompt: list[int], way: str, max_tokens: int = 3) -> Streamed:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        if way == "handoff":
            body["kv_mode"] = "push"
        return await stream_completion(self._session, self._deployment.url, body)

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(3, 2000) for _ in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=TARGET)
    report = LocalReport()
    flags = ["--max-local-prefill-length", "1024", "--allow-mode-override"]
    with BreakableDeployment(parser.parse_args().model, router_flags=flags) as deployment:
        asyncio.run(_Run(deployment, report).run())
    print(report.table())


if __name__ == "__main__":
    main()

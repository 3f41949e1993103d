"""The cost of computing a prompt on the decode engine against handing it off: TTFT, and the decodes meanwhile.

    python -m benchmarks.serving.local_prefill [MODEL]

For each length, prompts that no cache holds are sent in turn with `kv_mode` (handed off) and without (computed by the
decode engine). Then the same while two streams decode: the longest gap of the streams while a prompt is computed. At
the end, a prompt that the decode engine holds, with the prefill engine running and stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from baton.bench.timed_stream import Streamed, stream_completion
from benchmarks.deployment import BreakableDeployment

TARGET = "models/baton-demo-llama"
LENGTHS = (16, 32, 64, 128, 256, 512)
_IDLE, _BESIDE, _ALONE_S = 9, 20, 0.03
_STREAM_TOKENS, _WARM_TOKENS = 1000, 20
_WAYS = ("local", "handoff")


@dataclass(slots=True)
class LocalReport:
    """Milliseconds by length and way: `ttft` of single prompts, `gaps` the longest of streams beside each prompt."""

    ttft: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    gaps: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    alone: list[float] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=dict)

    def table(self) -> str:
        lines = [f"longest gap within {_ALONE_S * 1e3:.0f} ms without arrivals: {_spread(self.alone)} ms"]
        lines.append(
            "tokens  TTFT local    handed off    longest gap beside it: local    handed off (ms, p50 and range)"
        )
        for length in LENGTHS:
            cells = [_spread(table[length, way]) for table in (self.ttft, self.gaps) for way in _WAYS]
            lines.append(f"{length:6d}  " + "  ".join(cells))
        for name, found in self.held.items():
            lines.append(f"TTFT of a held prompt of 512 tokens, prefill engine {name}: {_spread(found)} ms")
        return "\n".join(lines)


def _spread(found: list[float]) -> str:
    return f"{statistics.median(found):6.2f} ({min(found):.2f} to {max(found):.2f})"


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
            self._report.alone = [await self._longest_gap(0, "local") for _ in range(_BESIDE)]
            for length in LENGTHS:
                for _ in range(_BESIDE):
                    for way in _WAYS:
                        found = self._report.gaps.setdefault((length, way), [])
                        found.append(await self._longest_gap(length, way))
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

    async def _longest_gap(self, length: int, way: str) -> float:
        """The longest time, in milliseconds, between two events of two streams while a prompt is computed."""
        streams = [Streamed(), Streamed()]
        tasks = [
            asyncio.create_task(self._ask(self._prompt(20), "local", _STREAM_TOKENS, stream)) for stream in streams
        ]
        await _events(streams, [_WARM_TOKENS] * 2)
        before = [len(stream.times_s) for stream in streams]
        await (self._ask(self._prompt(length), way) if length else asyncio.sleep(_ALONE_S))
        await _events(streams, [len(stream.times_s) + 1 for stream in streams])
        for task in tasks:
            if task.done():
                raise SystemExit("a stream ended before the prompt beside it was computed")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        times = [stream.times_s[first - 1 :] for stream, first in zip(streams, before, strict=True)]
        return max(later - earlier for each in times for earlier, later in itertools.pairwise(each)) * 1e3

    async def _ask(self, prompt: list[int], way: str, max_tokens: int = 3, into: Streamed | None = None) -> Streamed:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        if way == "handoff":
            body["kv_mode"] = "push"
        return await stream_completion(self._session, self._deployment.url, body, into)

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(3, 2000) for _ in range(length)]


async def _events(streams: Sequence[Streamed], numbers: Sequence[int]) -> None:
    while any(len(stream.times_s) < number for stream, number in zip(streams, numbers, strict=True)):
        await asyncio.sleep(0.001)


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

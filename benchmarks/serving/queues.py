"""`python -m benchmarks.serving.queues`: overloads without faults, in which engines could wait for each other's pages.

Three loads over real processes with small pools: one router and a prefix store with prompts of three lengths; two
routers over 2P2D with space for two requests; one sequence at a time, a long stream and three others. All requests
arrive at once. Prints how many were served, and the longest wait over that of an ideal order: all requests one after
the other, each with its time alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from baton.bench.timed_stream import stream_completion
from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import make_cases
from benchmarks.demo import SPECULATIVE, TARGET
from benchmarks.deployment import BreakableDeployment

# KV bytes per token of the demo checkpoint and its drafter, in pages of 16.
_PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` are (prompt tokens, output tokens). `num_pages` is the pool size of each engine."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_pages: int
    num_engines: int = 1
    routers: int = 1
    prefix_store: bool = False
    max_num_seqs: int = 64


def loads(scale: float) -> list[Load]:
    """The three loads. `scale` shrinks the first two."""
    few, many = max(1, round(33 * scale)), max(4, round(120 * scale))
    return [
        Load("prefix store", tuple((n, 8) for n in (100, 1000, 3000) for _ in range(few)), 250, prefix_store=True),
        Load("2P2D, two routers", tuple((100 + i % 16, 16) for i in range(many)), 20, num_engines=2, routers=2),
        Load("one sequence", ((30, 1500), (31, 8), (32, 8), (33, 8)), 250, max_num_seqs=1),
    ]


async def play(load: Load) -> str:
    """Returns one line of the report."""
    tokenizer = Tokenizer.load(TARGET)
    lengths = [length for length, _ in load.requests]
    prompts = [list(c.prompt_token_ids) for c in make_cases(tokenizer, lengths, SamplingParams())]
    with tempfile.TemporaryDirectory() as store:
        config = f'{{"prefix_store": "file://{store}/kv"}}' if load.prefix_store else "{}"
        flags = ["--speculative-config", json.dumps(SPECULATIVE), "--kv-transfer-config", config]
        flags += ["--kv-cache-memory", str(load.num_pages * _PAGE_BYTES), "--max-num-seqs", str(load.max_num_seqs)]
        flags += ["--max-model-len", str(16 * (load.num_pages - 2))]
        n = load.num_engines
        deployment = await asyncio.to_thread(
            BreakableDeployment, TARGET, n, n, engine_flags=flags, routers=load.routers
        )
        with deployment:
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
                return await _measure(load, prompts, deployment.router_urls, session)


async def _measure(load: Load, prompts: list[list[int]], urls: Sequence[str], session: aiohttp.ClientSession) -> str:
    def body(index: int) -> dict[str, object]:
        most = load.requests[index][1]
        return {"prompt": prompts[index], "max_tokens": most, "temperature": 0, "ignore_eos": True}

    routers = itertools.cycle(urls)
    alone: dict[tuple[int, int], float] = {}
    for index, kind in enumerate(load.requests):
        if kind not in alone:
            started = time.perf_counter()
            await stream_completion(session, next(routers), body(index))
            alone[kind] = time.perf_counter() - started
    ideal = sum(alone[kind] for kind in load.requests)
    started = time.perf_counter()
    waits: list[float] = []
    errors: list[str] = []

    async def one(index: int) -> None:
        try:
            await stream_completion(session, next(routers), body(index))
            waits.append(time.perf_counter() - started)
        except BatonError as error:
            errors.append(str(error)[:200])

    await asyncio.gather(*(one(index) for index in range(len(prompts))))
    longest = max(waits, default=float("nan"))
    served = f"{load.name}: {len(waits)} of {len(prompts)} served, longest wait {longest:.1f} s"
    return "; ".join([f"{served}, {longest / ideal:.2f} of an ideal order", *sorted(set(errors))])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.queues", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    args = parser.parse_args()
    for load in loads(args.scale):
        print(asyncio.run(play(load)), flush=True)


if __name__ == "__main__":
    main()

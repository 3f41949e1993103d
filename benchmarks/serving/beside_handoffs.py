"""`python -m benchmarks.serving.beside_handoffs`: inter-token latency of streams while handoffs arrive, over without.

Streams decode on an engine that is pinned to a core. Phases with and without arrivals alternate. An arrival is a prompt
that another engine, pinned to another core, prefills, and for which the decode engine computes one step. With
`--own-steps 0` it computes none: a control, in which prompts are prefilled and nothing is handed over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from baton.bench.load_requests import LoadRequest
from baton.bench.timed_stream import stream_completion
from baton.openai.client import OpenAIClient, connected_client
from benchmarks.demo import TARGET
from benchmarks.deployment import BreakableDeployment
from benchmarks.serving.pinned import EXTRA, hurry, make_requests, parse_cores, pin_all


def body_of(model: str, request: LoadRequest) -> dict[str, Any]:
    return {"model": model, "prompt": list(request.prompt), "max_tokens": request.max_tokens, **EXTRA}


async def watch(session: aiohttp.ClientSession, url: str, body: dict[str, Any], times: list[float]) -> None:
    """Append the time of each event of a stream to `times`, then nan, and start another stream as soon as one ends."""
    while True:
        async for event in OpenAIClient(session, url).stream(body):
            if event.choices:
                times.append(time.perf_counter())
        times.append(float("nan"))


async def arrive(
    session: aiohttp.ClientSession, url: str, model: str, requests: Sequence[LoadRequest], rate: float, until: float
) -> int:
    """Send prompts at equal intervals until `until`. Returns their number."""
    asked = []
    begin = time.perf_counter()
    for number, request in enumerate(requests):
        due = begin + number / rate
        if due >= until:
            break
        await asyncio.sleep(due - time.perf_counter())
        asked.append(asyncio.create_task(stream_completion(session, url, body_of(model, request))))
    await asyncio.gather(*asked)
    return len(asked)


async def measure(url: str, options: argparse.Namespace) -> tuple[list[list[float]], list[list[float]], int]:
    """Gaps in seconds of each phase without arrivals and of each with them, and the number of arrivals."""
    steps = options.own_steps
    prompts = make_requests(options.model, options.prompt, 1 + steps, 2000, 5)
    streams = make_requests(options.model, 32, options.tokens, options.streams, 6)
    times: list[list[float]] = [[] for _ in streams]
    marks: list[tuple[float, float, bool]] = []
    sent = 0
    async with connected_client(url, 30.0) as client:
        model = (await client.model()).id
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        running = [
            asyncio.create_task(watch(session, url, body_of(model, request), noted))
            for request, noted in zip(streams, times, strict=True)
        ]
        await asyncio.sleep(2.0)
        for phase in range(2 * options.rounds + 1):
            begin = time.perf_counter()
            if phase % 2:
                rest = prompts[sent:]
                sent += await arrive(session, url, model, rest, options.rate, begin + options.phase)
            else:
                await asyncio.sleep(options.phase)
            marks.append((begin, time.perf_counter(), bool(phase % 2)))
        for task in running:
            task.cancel()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                sys.exit(f"a stream failed: {ended}")
    phases: dict[bool, list[list[float]]] = {False: [], True: []}
    for begin, end, with_arrivals in marks[1:]:  # the first phase warms up
        gaps = [(at, gap) for noted in times for at, gap in zip(noted[1:], np.diff(noted).tolist(), strict=True)]
        phases[with_arrivals].append([gap for at, gap in gaps if begin <= at < end and not math.isnan(gap)])
    return phases[False], phases[True], sent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.beside_handoffs")
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--kv-mode", default="push", choices=("push", "pull"))
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt that arrives")
    parser.add_argument("--own-steps", type=int, default=1, help="steps of the decode engine for each")
    parser.add_argument("--rate", type=float, default=5.0, help="arrivals a second")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2000, help="of a stream, after which another one begins")
    parser.add_argument("--phase", type=float, default=2.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prefill-cores", type=parse_cores, default=[0])
    parser.add_argument("--decode-cores", type=parse_cores, default=[1])
    parser.add_argument("--other-cores", type=parse_cores, default=[0, 1], help="of the router and this client")
    parser.add_argument("--real-time", action="store_true", help="router and client run before all else")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the engines")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(len(options.decode_cores))
    os.sched_setaffinity(0, options.other_cores)
    cores = {"prefill": options.prefill_cores, "decode": options.decode_cores, "router": options.other_cores}
    flags = ["--no-enable-prefix-caching", *options.flag]
    with BreakableDeployment(options.model, engine_flags=flags, router_flags=["--kv-mode", options.kv_mode]) as two:
        pin_all(two, cores)
        if options.real_time:
            hurry(two.pids["router"])
            hurry(os.getpid())
        without, beside, sent = asyncio.run(measure(two.url, options))
    told: dict[str, Any] = {"arrivals": sent, "gaps": [sum(map(len, without)), sum(map(len, beside))]}
    for name, part in (("p50", 50), ("p99", 99), ("mean", None)):
        values = [
            [float(np.mean(gaps) if part is None else np.percentile(gaps, part)) * 1e3 for gaps in phases]
            for phases in (without, beside)
        ]
        # A phase with arrivals over the phase without arrivals before it.
        ratios = sorted(b / a for a, b in zip(*values, strict=False))
        told[name] = {
            "without_ms": statistics.median(values[0]),
            "beside_ms": statistics.median(values[1]),
            "ratio": statistics.median(ratios),
            "least": ratios[0],
            "greatest": ratios[-1],
        }
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())

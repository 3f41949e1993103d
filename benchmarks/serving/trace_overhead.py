"""`python -m benchmarks.serving.trace_overhead`: what traces cost a deployment, in CPU time.

One prefill and one decode engine with EAGLE-3 and a router that sends spans to a collector (this process, not counted).
Rounds of equal concurrent streams, in turn with a `traceparent` that samples and one that does not; without traces no
code of them runs at all. Per pair of rounds: CPU seconds of router and engines, and of the router alone. Other load on
the machine makes both rounds of a pair dearer, so their quotient says more than their difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
from collections.abc import Sequence

import aiohttp

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from benchmarks.demo import SPECULATIVE, TARGET
from benchmarks.scrape import descendants, process_cpu_s
from testkit.servers.collector import Collector

_PROMPT_TOKENS, _OUTPUT_TOKENS = 256, 64
_EXPORT_S = 5.0  # OpenTelemetry's default


def _cpu_s() -> dict[str, float]:
    """CPU seconds of this process's descendants so far: of the router, and of all."""
    found = {"router": 0.0, "all": 0.0}
    for pid, words in descendants(os.getpid()).items():
        used = process_cpu_s(pid)
        found["all"] += used
        found["router"] += used * ("router" in words)
    return found


async def _round(url: str, streams: int, waves: int, sampled: bool) -> dict[str, float]:
    """CPU seconds of one round: `waves` times `streams` requests at once."""
    before = _cpu_s()
    trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-0{int(sampled)}"
    async with aiohttp.ClientSession(headers={"traceparent": trace}) as session:
        body = {"max_tokens": _OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
        prompts = [[10 + (7 * i + j) % 200 for j in range(_PROMPT_TOKENS)] for i in range(streams)]
        for _ in range(waves):
            await asyncio.gather(*(stream_completion(session, url, {**body, "prompt": prompt}) for prompt in prompts))
    await asyncio.sleep(1.2 * _EXPORT_S)
    after = _cpu_s()
    return {name: after[name] - before[name] for name in after}


async def measure(streams: int, waves: int, rounds: int) -> None:
    collector, pairs = Collector(), []
    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--no-enable-prefix-caching"]
    async with collector.run() as endpoint:
        to = ["--otlp-traces-endpoint", endpoint]
        up = await asyncio.to_thread(Deployment, str(TARGET), engine_flags=flags, router_flags=to)
        try:
            await _round(up.url, streams, 1, True)
            for number in range(rounds):
                order = (False, True) if number % 2 else (True, False)
                cost = {sampled: await _round(up.url, streams, waves, sampled) for sampled in order}
                pairs.append((cost[False], cost[True]))
                told = [", ".join(f"{name} {one[name]:.3f} s" for name in one) for one in pairs[-1]]
                print(f"untraced: {told[0]}; traced: {told[1]}", flush=True)
        finally:
            await asyncio.to_thread(up.close)
    print(
        f"{streams} streams of {_OUTPUT_TOKENS} tokens, {rounds} pairs of {waves} rounds, {len(collector.spans)} spans"
    )
    _report(streams * waves, pairs)


def _report(num_requests: int, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> None:
    more = [traced["router"] - untraced["router"] for untraced, traced in pairs]
    figures = {
        "router, ms of CPU more per traced request": [1e3 * one / num_requests for one in more],
        "router, % more CPU": [100 * one / pair[0]["router"] for one, pair in zip(more, pairs, strict=True)],
        "of the deployment's CPU, %": [100 * one / pair[0]["all"] for one, pair in zip(more, pairs, strict=True)],
        "deployment with engines, % more CPU": [100 * (b["all"] / a["all"] - 1) for a, b in pairs],
    }
    for name, values in figures.items():
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--waves", type=int, default=4, help="requests of each stream in a round")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of rounds")
    options = parser.parse_args()
    asyncio.run(measure(options.streams, options.waves, options.rounds))


if __name__ == "__main__":
    main()

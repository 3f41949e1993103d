"""`python -m benchmarks.serving.trace_overhead`: what traces cost a deployment, in CPU time.

One prefill and one decode engine with EAGLE-3 and a router that sends spans to a collector (this process, not counted).
Rounds of equal concurrent streams, in turn with a `traceparent` that samples and one that does not; without traces no
code of them runs at all. Per pair of rounds: CPU seconds of router and engines, and of the router alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
from pathlib import Path

import aiohttp

from baton.bench.client import stream_completion
from baton.deployment import Deployment
from baton.transports.process import stat_of
from benchmarks.demo import SPECULATIVE, TARGET
from testkit.servers.collector import Collector

_PROMPT_TOKENS, _OUTPUT_TOKENS = 256, 64
_WAVES, _EXPORT_S = 4, 1.0


def _cpu_s() -> dict[str, float]:
    """CPU seconds of this process's descendants so far: of the router, and of all."""
    parents, ticks = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := stat_of(int(entry.name)):
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    found = {"router": 0.0, "all": 0.0}
    for pid in parents:
        above = parents[pid]
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid():
            used = ticks[pid] / os.sysconf("SC_CLK_TCK")
            found["all"] += used
            if b"router" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found["router"] += used
    return found


async def _round(url: str, streams: int, sampled: bool) -> dict[str, float]:
    """CPU seconds of one round."""
    before = _cpu_s()
    trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-0{int(sampled)}"
    async with aiohttp.ClientSession(headers={"traceparent": trace}) as session:
        body = {"max_tokens": _OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
        prompts = [[10 + (7 * i + j) % 200 for j in range(_PROMPT_TOKENS)] for i in range(streams)]
        for _ in range(_WAVES):  # a tick of CPU time is 10 ms
            await asyncio.gather(*(stream_completion(session, url, {**body, "prompt": prompt}) for prompt in prompts))
    await asyncio.sleep(2 * _EXPORT_S)
    after = _cpu_s()
    return {name: after[name] - before[name] for name in after}


async def measure(streams: int, rounds: int) -> None:
    collector, overhead, router = Collector(), [], []
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(int(1e3 * _EXPORT_S))  # of the router
    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--no-enable-prefix-caching"]
    async with collector.run() as endpoint:
        to = ["--otlp-traces-endpoint", endpoint]
        up = await asyncio.to_thread(Deployment, str(TARGET), engine_flags=flags, router_flags=to)
        try:
            await _round(up.url, streams, True)
            for number in range(rounds):
                order = (False, True) if number % 2 else (True, False)
                cost = {sampled: await _round(up.url, streams, sampled) for sampled in order}
                router.append(cost[True]["router"] - cost[False]["router"])
                overhead.append(router[-1] / cost[False]["all"])
                print(f"untraced {cost[False]}, traced {cost[True]}", flush=True)
        finally:
            await asyncio.to_thread(up.close)
    per_request = sorted(1e3 * one / (streams * _WAVES) for one in router)
    shares = sorted(100 * one for one in overhead)
    print(f"{streams} streams of {_OUTPUT_TOKENS} tokens, {rounds} pairs of rounds, {len(collector.spans)} spans")
    print(
        f"router: {statistics.median(per_request):.2f} ms of CPU more per traced request"
        f" ({per_request[0]:.2f} to {per_request[-1]:.2f})"
    )
    print(f"deployment: {statistics.median(shares):.2f} % more CPU ({shares[0]:.2f} to {shares[-1]:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.streams, options.rounds))


if __name__ == "__main__":
    main()

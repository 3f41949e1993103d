"""Goodput of 1, 2 and 4 routers side by side, which tell each other nothing, over the modelled engines of `goodput`.

    python -m benchmarks.serving.several_routers [--requests 400] [--speed 3] [--routers 1,2,4]

A balancer sends each request to any of the routers. A router knows the load of its own requests only. Of what engines
hold, it guesses from what it has sent itself, or knows it from KV events, which all routers read.
"""

from __future__ import annotations

import argparse

from benchmarks.serving.goodput import HAND_BACK, TPOT_SLO_S, TTFT_SLO_S, Cluster, GoodputReport, Machine
from benchmarks.serving.trace import TraceRequest, describe, make_trace

POLICIES = ("power_of_two", "cache_aware", HAND_BACK)
_ENGINES = 4


def run_routers(policy: str, num_routers: int, has_events: bool, trace: list[TraceRequest]) -> GoodputReport:
    first = Cluster(policy, _ENGINES, _ENGINES, Machine(), has_events=has_events)
    others = [Cluster(policy, _ENGINES, _ENGINES, Machine(), seed, first, has_events) for seed in range(1, num_routers)]
    return first.run(trace, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--speed", type=float, default=3.0)
    parser.add_argument("--routers", default="1,2,4")
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    trace = make_trace(options.requests, options.speed)
    print(f"objectives: TTFT {TTFT_SLO_S:g} s, TPOT {TPOT_SLO_S * 1e3:g} ms; trace: {describe(trace)}")
    print(
        "| policy, knowledge, routers | speed | requests/s | goodput/s | share within | TTFT p50, p90, p99 (ms) | "
        "TPOT p50, p99 (ms) | computed | handed back |\n|---|---|---|---|---|---|---|---|---|"
    )
    for policy in options.policies.split(","):
        for knowledge, has_events in (("guesses", False), ("events", True)):
            if has_events and policy == "power_of_two":
                continue  # it asks for loads only
            for num in map(int, options.routers.split(",")):
                report = run_routers(policy, num, has_events, trace)
                print(report.line(f"{policy}, {knowledge}, {num}", options.speed, trace[-1].at_s), flush=True)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.serving.push_over_pull`: TTFT and TPOT of push and of pull, near saturation, as Markdown.

Two deployments of one prefill and one decode engine on the same cores, one in push and one in pull mode, are loaded in
turns: with fresh or fully fragmented pools, and prompts that no cache holds or that the decode engine holds. The load's
rate is a share of push's throughput with all such requests at once. A ratio is pull over push of one round; figures are
medians of rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.demo import TARGET
from benchmarks.deployment import BreakableDeployment
from benchmarks.serving.pinned import figures, make_requests, parse_cores, pin_all, send

COLUMNS = tuple(f"{part}_{metric}_ms" for metric in ("ttft", "tpot") for part in ("mean", "median", "p99"))
MODES = ("push", "pull")


def start(model: str, mode: str, fragmented: bool, flags: Sequence[str], cores: dict[str, Any]) -> BreakableDeployment:
    """One prefill and one decode engine, with scattering pools if `fragmented`."""
    command = (sys.executable, "-m", "benchmarks.serving.pinned") if fragmented else None
    # As under `baton up`: D serves prompts that it holds alone.
    router = ["--kv-mode", mode, "--max-local-prefill-length", "64"]
    deployment = BreakableDeployment(model, engine_flags=flags, router_flags=router, command=command)
    pin_all(deployment, cores)
    return deployment


def rounds(
    urls: dict[str, str], options: argparse.Namespace, prompt: int, output: int, hit: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Loads of both modes in turns, each round with new prompts; the first does not count."""
    probe = make_requests(options.model, prompt, output, options.requests, 9)
    most = figures(send(urls["push"], probe, float("inf"), 0, 16))["request_throughput"]
    for turn in range(options.rounds + 1):
        requests = make_requests(options.model, prompt, output, options.requests, 1000 * prompt + turn)
        for mode in MODES if turn % 2 else MODES[::-1]:
            if hit:
                send(urls[mode], requests, float("inf"), 0, 4)
            run = send(urls[mode], requests, options.load * most, turn)
            found = figures(run)
            if found["failed"]:
                sys.exit(f"{mode}: {found['errors_by_kind']}")
            if turn:
                yield mode, {**found, "rate": options.load * most}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.push_over_pull")
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--shapes", default="512/64,2048/128", help="tokens of prompts / of answers")
    parser.add_argument("--requests", type=int, default=30, help="of a load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=float, default=0.85, help="part of what is served at most")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--prefill-cores", type=parse_cores, default=[0])
    parser.add_argument("--decode-cores", type=parse_cores, default=[1])
    parser.add_argument("--other-cores", type=parse_cores, default=[0, 1], help="of the router and this client")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the engines")
    parser.add_argument("--pools", default="fresh,fragmented")
    parser.add_argument("--cells", default="no hit,full hit")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.sched_setaffinity(0, options.other_cores)
    cores = {"prefill": options.prefill_cores, "decode": options.decode_cores, "router": options.other_cores}
    print(f"{options.model}, {options.requests} requests a load, {options.rounds} rounds, {options.threads} threads")
    heads = [
        "in/out",
        "pools",
        "D holds",
        "requests/s",
        *(name.removesuffix("_ms").replace("_", " ") for name in COLUMNS),
    ]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for pools in options.pools.split(","):
        fragmented = pools == "fragmented"
        with ExitStack() as stack:
            urls = {
                mode: stack.enter_context(start(options.model, mode, fragmented, options.flag, cores)).url
                for mode in MODES
            }
            for shape in options.shapes.split(","):
                prompt, output = map(int, shape.split("/"))
                for cell in options.cells.split(","):
                    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
                    for mode, one in rounds(urls, options, prompt, output, cell == "full hit"):
                        found[mode].append(one)
                    rate = found["push"][0]["rate"]
                    line = [shape, pools, cell, f"{rate:.1f}"]
                    line += [_cell(found, column) for column in COLUMNS]
                    print(f"| {' | '.join(line)} |", flush=True)
    return 0


def _cell(found: dict[str, list[dict[str, Any]]], column: str) -> str:
    push, pull = ([one[column] for one in found[mode]] for mode in MODES)
    ratios = sorted(b / a for a, b in zip(push, pull, strict=True))
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return f"{statistics.median(push):.1f}, {statistics.median(pull):.1f}: {statistics.median(ratios):.2f} ({spread})"


if __name__ == "__main__":
    sys.exit(main())

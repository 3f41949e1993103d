"""`python -m benchmarks.serving.load_sweep`: goodput by load of P/D deployments and of one engine on the same cores.

Rates go up to 1.5 times saturation, which is the one engine's throughput of a closed loop unless given. If the queue
were longer than the TTFT objective times that rate, all served requests would miss the objective, so the queue is
short. If the batch were larger than meets the TPOT objective, all running requests would miss it, so the batch is
small. Only refusals (429) are allowed as failures. Exit code 1 if there are others, or if goodput past saturation falls
below half of its best.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from baton.bench.load_figures import parse_goodput
from baton.bench.picture import check_picture, draw_sweep
from benchmarks.demo import TARGET
from benchmarks.deployment import BreakableDeployment
from benchmarks.serving.pinned import figures, make_requests, parse_cores, pin_all, send

PARTS = (0.5, 0.75, 0.9, 1.0, 1.25, 1.5)
PROBES, AT_ONCE = 64, 8
KEPT = ("request_rate", "completed", "failed", "request_throughput", "request_goodput", "errors_by_kind")


def start(model: str, pairs: int, options: argparse.Namespace) -> BreakableDeployment:
    """`pairs` prefill and as many decode engines with half of the cores each; 0: one engine with all of them."""
    cores = options.cores
    half = len(cores) // 2
    os.environ["OMP_NUM_THREADS"] = str(len(cores) if not pairs else max(1, half // pairs))
    queue = ["--max-queued-requests", str(options.max_queued_requests)]
    flags = [*queue, "--max-num-seqs", str(options.max_num_seqs), *options.flag]
    # As under `baton up`: short prompts are not handed over, and the router knows the queue limit.
    router = [*queue, "--max-local-prefill-length", "64"]
    deployment = BreakableDeployment(model, pairs, pairs, int(not pairs), engine_flags=flags, router_flags=router)
    places = {"prefill": cores[:half], "decode": cores[half:], "both": cores, "router": options.other_cores}
    pin_all(deployment, places)
    return deployment


def main() -> int:
    """Print results as JSON lines and draw them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.load_sweep")
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--shape", default="512/64", help="tokens of prompts / of answers")
    parser.add_argument("--pairs", default="0,1", help="curves: pairs of engines; 0 is one engine")
    parser.add_argument("--saturation", type=float, default=0.0, help="requests/s; default: what a closed loop has")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds of each rate")
    parser.add_argument("--goodput", default="ttft:500 tpot:20", help="milliseconds")
    parser.add_argument("--max-queued-requests", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=16, help="a batch that still meets the TPOT of --goodput")
    parser.add_argument("--cores", type=parse_cores, default=[0, 1])
    parser.add_argument("--other-cores", type=parse_cores, default=[0, 1], help="of the router and this client")
    parser.add_argument("--flag", action="append", default=[], help="one more flag of the engines")
    parser.add_argument("--plot", help="a .png file")
    parser.add_argument("--output-json", help="a file")
    options = parser.parse_args()
    if options.plot:
        check_picture(options.plot)
    os.sched_setaffinity(0, options.other_cores)
    prompt, output = map(int, options.shape.split("/"))
    goodput = parse_goodput(options.goodput)
    curves: dict[str, list[dict[str, Any]]] = {}
    most, wrong = options.saturation, False
    for pairs in sorted(map(int, options.pairs.split(","))):
        name = f"{pairs} prefill, {pairs} decode" if pairs else "one engine"
        with start(options.model, pairs, options) as deployment:
            url = deployment.url
            if not most:
                send(url, make_requests(options.model, prompt, output, AT_ONCE, 0), float("inf"), 0)
                probe = make_requests(options.model, prompt, output, PROBES, 1)
                most = figures(send(url, probe, float("inf"), 0, AT_ONCE))["request_throughput"]
                print(f"{name}: {most:.2f} requests/s served of {PROBES}, {AT_ONCE} at a time", flush=True)
            curves[name] = []
            for turn, part in enumerate(PARTS):
                rate = part * most
                count = max(8, round(rate * options.duration))
                requests = make_requests(options.model, prompt, output, count, 2 + turn)  # held by no cache
                found = {**figures(send(url, requests, rate, 3), goodput), "request_rate": rate}
                curves[name].append({key: value for key, value in found.items() if not isinstance(value, list)})
                print(json.dumps({"curve": name, **{key: found[key] for key in KEPT}}), flush=True)
                wrong |= bool(found["errors_by_kind"].keys() - {"429"})
        best = max(one["request_goodput"] for one in curves[name])
        kept = curves[name][-1]["request_goodput"] / best if best else 0.0
        print(f"{name}: goodput at 1.5 times saturation is {kept:.2f} of its best", flush=True)
        wrong |= kept < 0.5
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(curves))
    if options.plot:
        draw_sweep(curves, options.plot)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

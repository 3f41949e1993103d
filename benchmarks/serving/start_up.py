"""Seconds from the start of `baton up` to its first answer, and when each process reaches which phase.

    python -m benchmarks.serving.start_up [MODEL] [--rounds N] [FLAGS OF baton up]

Every round starts all processes afresh, with compiled kernels in the cache, and sends one request that is handed off.
The machine's own rate is the time of a process that imports PyTorch and Numba, before each round. The default model is
SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from datetime import datetime

import aiohttp

from baton.bench.timed_stream import stream_completion
from benchmarks.engine.decode import spread
from benchmarks.faults.supervised import Supervised
from benchmarks.smollm2 import smollm2

# Longer than a decode engine's local prefill limit, so that the request is handed off.
_PROMPT = list(range(100, 300))


def import_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, numba"], check=True)
    return time.perf_counter() - began


async def first_answer(url: str) -> None:
    body = {"prompt": _PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        await stream_completion(session, url, body)


def start(model: str, flags: list[str]) -> tuple[float, dict[str, float]]:
    """The seconds to the first answer, and to each line of progress, by its first words."""
    began, clock = time.perf_counter(), time.time()
    with Supervised(model, 1, 1, flags) as deployment:
        asyncio.run(first_answer(deployment.url))
        took = time.perf_counter() - began
        lines = deployment.log().splitlines()
    phases = {}
    for line in lines:
        stamp, _, text = line.partition(" INFO baton: ")
        name, _, phase = text.partition(": ")
        if name in ("prefill-0", "decode-0"):
            phases[f"{name} {' '.join(phase.split()[:2])}"] = datetime.fromisoformat(stamp).timestamp() - clock
    return took, phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    options, flags = parser.parse_known_args()
    model = options.model or str(smollm2())
    start(model, flags)  # compiles what is not in the cache
    imports, answers, phases = [], [], defaultdict(list)
    for _ in range(options.rounds):
        imports.append(import_seconds())
        took, reached = start(model, flags)
        answers.append(took)
        for name, seconds in reached.items():
            phases[name].append(seconds)
    ratios = [took / importing for took, importing in zip(answers, imports, strict=True)]
    print(f"import of PyTorch and Numba  {spread(imports)} s")
    print(f"first answer                 {spread(answers)} s, {spread(ratios)} of it")
    for name, values in phases.items():
        print(f"  {name:27}{spread(values)} s")


if __name__ == "__main__":
    main()

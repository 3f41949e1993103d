"""Time of a decode step on this machine, and the rates of its memory and products that bound it.

    python -m benchmarks.engine.decode [MODEL] [--processes 5] [--against COMMIT] [--quantization int8]

Each figure is the median of fresh processes' medians, with the least and the greatest. A step is an engine's, from
scheduling to emitting tokens, in bfloat16, after prompts of 128 tokens. With `--against` processes of this tree and of
the commit take turns, and the ratio is this tree's time over the commit's. The default model is SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, STEPS = 128, 24
_PRODUCT = 2048


def rates(dtype: str = "bfloat16") -> dict[str, float]:
    """GB/s of reading memory, and GFLOP/s of a large product, on all threads: in float32 where the CPU has no products
    of bfloat16.
    """
    import torch

    from baton.kernels.cpu.gemm.wide_gemm import HAS_WIDE_PRODUCTS

    memory, square = torch.ones(1 << 26), torch.randn(_PRODUCT, _PRODUCT)
    row = memory[:4096]
    if dtype == "bfloat16" and not HAS_WIDE_PRODUCTS:
        square = square.bfloat16()

    def best(call: Any) -> float:
        found = []
        for _ in range(6):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        return min(found)

    read = memory.nbytes / best(lambda: memory.view(-1, 4096) @ row)
    return {"GB/s": read / 1e9, "GFLOP/s": 2 * _PRODUCT**3 / best(lambda: square @ square) / 1e9}


def steps(model: str, quantization: str | None, batches: list[int]) -> dict[str, float]:
    """Milliseconds of a step, by number of requests."""
    from baton.engine.llm import LLM
    from baton.engine.request_checks import make_request
    from baton.sampling_params import SamplingParams
    from baton.wire import GenerateRequest

    found: dict[str, float] = {}
    with LLM(model, dtype="bfloat16", kv_cache_memory=1 << 29, quantization=quantization) as llm:
        core = llm._engine.core
        for turn, batch in enumerate([batches[0], *batches]):  # the first warms up
            params = SamplingParams(max_tokens=STEPS + 4, temperature=0.0, ignore_eos=True)
            for index in range(batch):
                prompt = [(7 * i + 13 * index + 31 * turn) % 40000 + 5 for i in range(PROMPT)]
                wire = GenerateRequest(request_id=f"{turn}-{index}", prompt_token_ids=prompt, sampling_params=params)
                llm._chunks[wire.request_id] = []
                core.add(make_request(llm._engine, wire))
            while core.scheduler.waiting or any(request.is_prefilling for request in core.scheduler.running):
                core.step()
            times = []
            while core.scheduler.running:
                began = time.perf_counter()
                core.step()
                times.append(time.perf_counter() - began)
            found[str(batch)] = 1e3 * statistics.median(times[:STEPS])
    return found


def fresh_process(tree: Path, arguments: list[str]) -> dict[str, float]:
    """The figures of a fresh process that runs the code of `tree`."""
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, __file__, *arguments, "--inside"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--batches", default="1,4,8,32")
    parser.add_argument("--quantization")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    batches = [int(number) for number in options.batches.split(",")]
    if options.inside:
        print(json.dumps({**rates(), **steps(options.model, options.quantization, batches)}))
        return
    from benchmarks.before_after import ROOT, checked_out
    from benchmarks.smollm2 import smollm2

    arguments = [options.model or str(smollm2()), "--batches", options.batches]
    arguments += ["--quantization", options.quantization] if options.quantization else []
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(checked_out(options.against)) if options.against else None
        mine, others = [], []
        for _ in range(options.processes):
            mine.append(fresh_process(ROOT, arguments))
            if other is not None:
                others.append(fresh_process(other, arguments))
    for name in mine[0]:
        line = f"{name:>8} {spread([one[name] for one in mine])}"
        if others:
            ratio = spread([one[name] / two[name] for one, two in zip(mine, others, strict=True)])
            line += f", {options.against} {spread([one[name] for one in others])}, ratio {ratio}"
        print(line, flush=True)


if __name__ == "__main__":
    main()

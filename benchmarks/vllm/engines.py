"""One engine against one vLLM server on the same cores of this machine: TTFT, TPOT, tokens per second.

    python -m benchmarks.vllm.engines MODEL --vllm-python $(python3 tools/install_vllm.py)/bin/python

Both serve the same checkpoint over HTTP, in the same dtype unless `--vllm-dtype` names another. They are measured in
turns, with new prompts of random tokens, so prefix caches help neither. vLLM waits without spinning
(`vllm_servers.ONE_PROCESS`). A ratio is Baton's value over vLLM's: the median over rounds, in each of which both sides
are measured one after the other.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from baton.models.loading.config_json import read_config
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, serve

TIMEOUT = aiohttp.ClientTimeout(total=300)
Prompt = list[int]
Figure = Callable[[aiohttp.ClientSession, str, list[Prompt]], Awaitable[float]]


def _body(prompt: Prompt, num: int) -> dict[str, object]:
    return {"model": "demo", "prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True}


async def ttft_ms(session: aiohttp.ClientSession, url: str, prompts: list[Prompt]) -> float:
    """Of a single request."""
    return (await stream_completion(session, url, _body(prompts[0], 1))).ttft_s * 1e3


async def tpot_ms(session: aiohttp.ClientSession, url: str, prompts: list[Prompt]) -> float:
    """Of a single request, 64 tokens."""
    return 1e3 / (await stream_completion(session, url, _body(prompts[0], 64))).tokens_per_s


async def tokens_per_s(session: aiohttp.ClientSession, url: str, prompts: list[Prompt]) -> float:
    """Of all prompts at once, 64 tokens each, from the first request to the last token."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(stream_completion(session, url, _body(prompt, 64)) for prompt in prompts))
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started)


# Name, measurement, prompts at once, tokens per prompt.
FIGURES: tuple[tuple[str, Figure, int, int], ...] = (
    ("TTFT, 128 tokens, ms", ttft_ms, 1, 128),
    ("TTFT, 512 tokens, ms", ttft_ms, 1, 512),
    ("TTFT, 2,048 tokens, ms", ttft_ms, 1, 2048),
    ("TPOT, batch 1, ms", tpot_ms, 1, 128),
    ("tokens/s, 8 at once", tokens_per_s, 8, 128),
    ("tokens/s, 16 at once", tokens_per_s, 16, 128),
    ("tokens/s, 32 at once", tokens_per_s, 32, 128),
    ("tokens/s, 64 at once", tokens_per_s, 64, 128),
)


async def measure(baton: str, vllm: str, vocab_size: int, rounds: int, warm_ups: int, only: str) -> None:
    """Print a line for each figure."""
    source = random.Random(0)
    async with aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        for name, figure, at_once, length in FIGURES:
            if only not in name:
                continue
            values: dict[str, list[float]] = {baton: [], vllm: []}
            for number in range(-warm_ups, rounds):
                for url in (baton, vllm) if number % 2 else (vllm, baton):
                    prompts = [[source.randrange(3, vocab_size) for _ in range(length)] for _ in range(at_once)]
                    value = await figure(session, url, prompts)
                    if number >= 0:
                        values[url].append(value)
            print(_line(name, values[baton], values[vllm]), flush=True)


def _line(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return (
        f"{name:24} Baton {statistics.median(ours):8.1f}  vLLM {statistics.median(theirs):8.1f}  "
        f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} rounds)"
    )


def main(
    model: str,
    vllm_python: Annotated[str, typer.Option(help="an interpreter that has vLLM")],
    dtype: str = "bfloat16",
    vllm_dtype: Annotated[str, typer.Option(help="of vLLM, whose bfloat16 is slow without AVX-512")] = "",
    threads: Annotated[int, typer.Option(help="of each server")] = os.cpu_count() or 1,
    rounds: int = 7,
    warm_ups: Annotated[int, typer.Option(help="rounds before: vLLM compiles more than once for a shape")] = 5,
    only: Annotated[str, typer.Option(help="figures whose names hold this")] = "",
    batch_invariant: bool = False,
) -> None:
    """Print Baton's figures, vLLM's, and their ratio."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    flags = ["--served-model-name", "demo", "--dtype", dtype, "--max-model-len", "4096"]
    if batch_invariant:
        flags.append("--batch-invariant")
    vllm_flags = "--dtype", vllm_dtype or dtype, "--no-enforce-eager", *ONE_PROCESS
    theirs = ServerConfig("vllm", vllm_flags, environment={"OMP_NUM_THREADS": str(threads)})
    print(f"{model} in {dtype} ({vllm_flags[1]}), {threads} threads of {os.cpu_count()} cores", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(vllm_python, model, Path(folder), [theirs]) as servers,
        Deployment(model, prefill=0, decode=0, both=1, router=False, engine_flags=flags) as ours,
    ):
        vocab_size = int(read_config(model)["vocab_size"])
        asyncio.run(measure(ours.engine_urls[0], servers[0].url, vocab_size, rounds, warm_ups, only))


if __name__ == "__main__":
    typer.run(main)

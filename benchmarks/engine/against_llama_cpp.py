"""Time per token of SmolLM2-135M-Instruct in bfloat16 beside llama.cpp, on the same cores of this machine.

    python -m benchmarks.engine.against_llama_cpp DIRECTORY [--rounds 5]

DIRECTORY has llama.cpp's `llama-bench` and `llama-server`. All processes start anew in each round, in turns.
A step is an engine's, after prompts of 128 tokens, as `benchmarks.engine.decode` times it, and `llama-bench`'s token is
generated after 128 tokens. Over HTTP it is the time between the events of a streamed completion of 64 tokens after
128 random ones, one request at a time. Figures are medians of the rounds', with the least and the greatest. Both have
the same weights: those of the GGUF file that `benchmarks.smollm2` reads, rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from baton.deployment import Deployment
from benchmarks.before_after import ROOT
from benchmarks.engine.decode import PROMPT, fresh_process, spread
from benchmarks.smollm2 import smollm2, stored_gguf

TOKENS, ANSWERS = 64, 5
_START_S, _PAUSE_S = 120.0, 0.2


def bf16_gguf() -> Path:
    """The model with matrices in bfloat16, beside the directory of `smollm2`, made by the first call."""
    import gguf

    directory = smollm2()
    file = directory.with_name(f"{directory.name}.bf16.gguf")
    if file.exists():
        return file
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        reader = gguf.GGUFReader(stored_gguf(Path(folder)))
        made = Path(folder) / "bf16.gguf"
        writer = gguf.GGUFWriter(made, "llama")
        for field in reader.fields.values():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            value = gguf.LlamaFileType.MOSTLY_BF16 if field.name == "general.file_type" else field.contents()
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
        for tensor in reader.tensors:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
            dtype = gguf.GGMLQuantizationType.BF16 if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(tensor.name, gguf.quantize(numbers, dtype), raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made.rename(file)
    return file


def llama_bench(program: Path, model: Path, threads: int) -> float:
    """Milliseconds of a token."""
    flags = ["-t", str(threads), "-p", "0", "-n", "32", "-d", str(PROMPT), "-r", "3", "-o", "json"]
    done = subprocess.run([str(program), "-m", str(model), *flags], check=True, capture_output=True, text=True)
    (found,) = json.loads(done.stdout)
    return 1e3 / float(found["avg_ts"])


@contextmanager
def llama_server(program: Path, model: Path, threads: int) -> Iterator[str]:
    """The URL of a running server."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["-t", str(threads), "-tb", str(threads), "-c", "4096", "-np", "1", "--host", "127.0.0.1"]
    with tempfile.TemporaryFile() as log:
        command = [str(program), "-m", str(model), *flags, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            asyncio.run(_answers(f"http://127.0.0.1:{port}", process))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


async def _answers(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_S
    async with aiohttp.ClientSession() as session:
        while process.poll() is None and time.monotonic() < until:
            try:
                async with session.get(f"{url}/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_PAUSE_S)
    sys.exit(f"llama-server does not serve the model (exit status {process.poll()})")


async def tpot_ms(url: str, source: random.Random) -> float:
    """The median of some answers, after one that is not counted."""
    found = []
    # llama-server ends a connection after a stream.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for _ in range(1 + ANSWERS):
            prompt = [source.randrange(20, 40_000) for _ in range(PROMPT)]
            body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            times = []
            async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as reply:
                reply.raise_for_status()
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
            found.append(1e3 * (times[-1] - times[0]) / (TOKENS - 1))
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of llama.cpp's programs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    for program in ("llama-bench", "llama-server"):
        if not (options.directory / program).is_file():
            parser.error(f"{options.directory} has no {program}")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    own, model, source = str(smollm2()), bf16_gguf(), random.Random(0)
    flags = ["--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", "4096"]
    found: dict[str, list[float]] = {}
    for number in range(options.rounds):
        figures = fresh_process(ROOT, [own, "--batches", "1"])
        figures["step, Baton"] = figures.pop("1")
        figures["step, llama.cpp"] = llama_bench(options.directory / "llama-bench", model, options.threads)
        with Deployment(own, prefill=0, decode=0, both=1, router=False, engine_flags=flags) as served:
            figures["HTTP, Baton"] = asyncio.run(tpot_ms(served.url, source))
        with llama_server(options.directory / "llama-server", model, options.threads) as url:
            figures["HTTP, llama.cpp"] = asyncio.run(tpot_ms(url, source))
        for way in ("step", "HTTP"):
            figures[f"{way}, ratio"] = figures[f"{way}, Baton"] / figures[f"{way}, llama.cpp"]
        for name, figure in figures.items():
            found.setdefault(name, []).append(figure)
        print(f"round {number}: " + ", ".join(f"{name} {figure:.2f}" for name, figure in figures.items()), flush=True)
    for name, column in found.items():
        print(f"{name:16} {spread(column)}{'' if '/' in name or 'ratio' in name else ' ms per token'}")


if __name__ == "__main__":
    main()

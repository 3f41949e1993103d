"""`python -m tools.gpu_check [--parts PART,...]`: checks that need one CUDA GPU, which CI lacks, in ten minutes.

The transports' conformance over device memory, the attention kernel, greedy tokens of the engine on the device against
those on the CPU, whole deployments that hand off from device memory against one engine, and ratios. Prints its results
as Markdown, which `benchmarks/results` keeps. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from baton.bench.client import stream_completion
from baton.deployment import Deployment
from baton.engine.llm import LLM
from baton.kv.geometry import CopyList
from baton.sampling_params import SamplingParams
from baton.testing.conformance import measure
from baton.testing.transport_memory import OnDevice
from baton.testing.transport_peer import SpawnedPeer
from baton.transports.registry import create_transport
from baton.verify.observe import make_cases
from testkit.checkpoints.common import make_checkpoint, make_drafter

DEVICE = "cuda:0"
MODELS = Path(__file__).parents[1] / "models"
LENGTHS = (1, 5, 15, 16, 17, 31, 64, 100)
# A Llama of 0.4 billion weights.
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Pair:
    """A target of the repository and a drafter for it."""

    target: str
    method: str
    head: str | None = None

    @property
    def spec(self) -> dict[str, Any]:
        head = {"model": str(MODELS / self.head)} if self.head else {}
        return {"method": self.method, "num_speculative_tokens": 3, **head}


PAIRS = (
    Pair("baton-demo-llama", "eagle", "baton-demo-eagle"),
    Pair("baton-demo-llama", "eagle3", "baton-demo-eagle3"),
    Pair("baton-demo-deepseek", "eagle3", "baton-demo-deepseek-eagle3"),
    Pair("baton-demo-deepseek", "mtp"),
)


def conformance() -> bool:
    """Every check of the transport suite, with regions in device memory and the peer in another process."""
    good = True
    for uri in ("cuda_ipc", "nixl"):
        cells, notes = measure(uri, DEVICE)
        passed = sum(cell != "FAILED" for cell in cells.values())
        print(f"- `{uri}`: {passed}/{len(cells)} checks" if cells else f"- {notes[0]}")
        for note in notes if cells else []:
            print(f"  - {note}")
        good &= passed == len(cells)
    return good


def kernels() -> bool:
    """The tests in `tests/` that need a device, except the conformance suite."""
    tests = ["tests/engine/attention/test_attention_cuda.py", "tests/engine/test_cuda.py"]
    # The project's own options need plug-ins that these tests do not.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
    found = subprocess.run([*command, *tests], capture_output=True, text=True, check=False)
    told = found.stdout.strip().splitlines()[-1] if found.stdout else found.stderr[-200:]
    print(f"- `pytest {' '.join(tests)}`: {told}")
    return found.returncode == 0


def _tokens(pair: Pair, device: str, dtype: str, speculative: bool) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"speculative_config": pair.spec} if speculative else {}
    with LLM(
        str(MODELS / pair.target), device=device, dtype=dtype, kv_cache_memory=1 << 28, batch_invariant=True, **settings
    ) as llm:
        prompts = [list(case.prompt_token_ids) for case in make_cases(llm._engine.tokenizer, LENGTHS, params)]
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


def parity() -> bool:
    """Greedy tokens: in float32 equal on device and CPU; in both dtypes equal with and without a drafter."""
    good = True
    for pair in PAIRS:
        on_cpu = _tokens(pair, "cpu", "float32", False)
        counts = []
        for dtype in ("float32", "bfloat16"):
            plain, drafted = (_tokens(pair, DEVICE, dtype, speculative) for speculative in (False, True))
            if dtype == "float32":
                counts.append(("device and CPU", sum(map(list.__eq__, plain, on_cpu))))
            counts.append((f"{dtype}, with a drafter and without", sum(map(list.__eq__, plain, drafted))))
        told = "; ".join(f"{what}: {count}/{len(LENGTHS)}" for what, count in counts)
        print(f"- {pair.target}, {pair.method}: {told}")
        good &= all(count == len(LENGTHS) for _, count in counts)
    return good


def verify() -> bool:
    """`baton verify`: deployments that hand off from device memory against one engine on the device."""
    good = True
    unequal = ["--dtype", "bfloat16", "--prefill-block-size", "8", "--integrity", "full"]
    for pair, flags in ((PAIRS[1], ["--dtype", "float32"]), (PAIRS[1], unequal), (PAIRS[2], unequal), (PAIRS[3], [])):
        command = [sys.executable, "-m", "baton.cli", "verify", str(MODELS / pair.target), "--device", DEVICE, *flags]
        command += ["--kv-transport", "cuda_ipc", "--kv-cache-memory", "512M", "--modes", "push,pull"]
        command += ["--speculative-config", json.dumps(pair.spec), "--lengths", "1,15,16,17,33,64,200"]
        found = subprocess.run([*command, "--max-tokens", "16"], capture_output=True, text=True, check=False)
        lines = found.stdout.strip().splitlines()
        print(f"- {pair.target}, {pair.method} {' '.join(flags)}: {lines[-1] if lines else found.stderr[-400:]}")
        for line in lines:
            if line.startswith("acceptance"):
                print(f"  - {line}")
        good &= found.returncode == 0
    return good


def copies() -> bool:
    """GB/s of the transport between two processes over a plain copy on the device, by length of run."""
    total = 64 << 20
    transport, far = create_transport("cuda_ipc"), SpawnedPeer("cuda_ipc", [total], DEVICE)
    try:
        memory = OnDevice(total, DEVICE)
        transport.register([memory.region])
        peer = transport.connect(far.descriptor).result(60)
        one, other = (torch.zeros(total, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        for run in (4 << 10, 32 << 10, 1 << 20):
            places = np.arange(0, total, run, dtype=np.int64)
            shuffled = np.random.default_rng(0).permutation(places)
            copied = CopyList(0, 0, places, shuffled, np.full(len(places), run, dtype=np.int64))
            ratios, speeds = [], []
            for _ in range(8):
                started = time.perf_counter()
                assert transport.submit(peer, "write", copied).wait(30) == "done"
                taken = time.perf_counter() - started
                started = time.perf_counter()
                other.copy_(one)
                torch.cuda.synchronize()
                plain = time.perf_counter() - started
                speeds.append(total / taken / 1e9)
                ratios.append(taken / plain)
            print(
                f"- 64 MiB in runs of {run >> 10} KiB, places shuffled: {statistics.median(speeds[1:]):.0f} GB/s "
                f"({min(speeds[1:]):.0f} to {max(speeds[1:]):.0f}); one copy of the whole on the device takes "
                f"1/{statistics.median(ratios[1:]):.1f} of the time"
            )
    finally:
        transport.close()
        far.close()
    return True


@contextlib.contextmanager
def _large() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        target = make_checkpoint(Path(directory) / "target", "llama", **LARGE)
        yield target, make_drafter(Path(directory) / "head", "eagle3", target, intermediate_size=1024)


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int]) -> tuple[float, float]:
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    answer = await stream_completion(session, url, {**body, "stream": True})
    assert len(answer.token_ids) == 32, answer
    return answer.ttft_s * 1e3, 1e3 / answer.tokens_per_s


async def _alternate(one: str, split: str, model: str, lengths: Sequence[int], rounds: int) -> None:
    generator = np.random.default_rng(0)
    async with aiohttp.ClientSession() as session:
        for length in lengths:
            ttft: list[float] = []
            tpot: list[float] = []
            alone: list[float] = []
            for number in range(rounds + 2):
                prompt = generator.integers(10, 30000, length).tolist()
                first, second = await _ask(session, one, model, prompt), await _ask(session, split, model, prompt)
                if number >= 2:
                    ttft.append(second[0] / first[0])
                    tpot.append(second[1] / first[1])
                    alone.append(first[0])
            print(
                f"- {length} tokens: TTFT of one engine {statistics.median(alone):.1f} ms; P/D over one engine "
                f"{statistics.median(ttft):.2f} ({min(ttft):.2f} to {max(ttft):.2f}), TPOT "
                f"{statistics.median(tpot):.2f} ({min(tpot):.2f} to {max(tpot):.2f})"
            )


def ratios(rounds: int) -> bool:
    """TTFT and TPOT of P/D over one engine, one request at a time, in turns; three engines share the device."""
    with _large() as (target, head):
        spec = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
        flags = ["--device", DEVICE, "--kv-cache-memory", "2G", "--speculative-config", spec]
        flags += ["--max-num-batched-tokens", "8192"]
        router = ["--max-local-prefill-length", "0"]
        with (
            Deployment(str(target), engine_flags=flags, kv_transport="cuda_ipc", router_flags=router) as split,
            Deployment(str(target), prefill=0, decode=0, both=1, engine_flags=flags, router_flags=router) as one,
        ):
            asyncio.run(_alternate(one.url, split.url, target.name, (128, 512, 2048, 8192), rounds))
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", allow_abbrev=False)
    parser.add_argument("--parts", default="conformance,kernels,parity,verify,copies,ratios")
    parser.add_argument("--rounds", type=int, default=6, help="of the ratios")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device here")
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    print(f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    parts = {
        "conformance": conformance,
        "kernels": kernels,
        "parity": parity,
        "verify": verify,
        "copies": copies,
        "ratios": lambda: ratios(options.rounds),
    }
    good = True
    for name in options.parts.split(","):
        print(f"\n## {name}\n", flush=True)
        started = time.perf_counter()
        held = parts[name]()
        good &= held
        print(f"\n{'holds' if held else 'FAILS'}, {time.perf_counter() - started:.0f} s", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

"""What a GPU's transport, deployments and layers with states take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from baton.bench.timed_stream import stream_completion
from baton.deployment import Deployment
from baton.kv.geometry import CopyList
from baton.models.layer_cache import ScanRows
from baton.models.layers.gated_delta import GatedDeltaNet, GatedDeltaSpec
from baton.models.layers.linear import Build
from baton.models.layers.mamba2 import Mamba2, Mamba2Spec
from baton.testing.transport_memory import OnDevice
from baton.testing.transport_peer import SpawnedPeer
from baton.transports.registry import create_transport
from testkit.checkpoints.common import make_checkpoint, make_drafter

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


def copies(device: str) -> bool:
    """GB/s of the transport between two processes over a plain copy on the device, by length of run."""
    total = 64 << 20
    transport, far = create_transport("cuda_ipc"), SpawnedPeer("cuda_ipc", [total], device)
    try:
        memory = OnDevice(total, device)
        transport.register([memory.region])
        peer = transport.connect(far.descriptor).result(60)
        one, other = (torch.zeros(total, dtype=torch.uint8, device=device) for _ in range(2))
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


def ratios(device: str, rounds: int) -> bool:
    """TTFT and TPOT of P/D over one engine, one request at a time, in turns; three engines share the device."""
    with _large() as (target, head):
        spec = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
        flags = ["--device", device, "--kv-cache-memory", "2G", "--speculative-config", spec]
        flags += ["--max-num-batched-tokens", "8192"]
        router = ["--max-local-prefill-length", "0"]
        with (
            Deployment(str(target), engine_flags=flags, kv_transport="cuda_ipc", router_flags=router) as split,
            Deployment(str(target), prefill=0, decode=0, both=1, engine_flags=flags, router_flags=router) as one,
        ):
            asyncio.run(_alternate(one.url, split.url, target.name, (128, 512, 2048, 8192), rounds))
    return True


def states(device: str) -> bool:
    """Milliseconds of one layer with states, of the sizes of Qwen3.5 and of Granite 4, by rows of one request."""
    build = Build(torch.bfloat16, torch.device(device), True)
    delta = GatedDeltaNet(GatedDeltaSpec(16, 128, 32, 128, 4), 4096, 1e-6, 0, build)
    mamba = Mamba2(Mamba2Spec(128, 64, 1, 128, 4), 4096, 1e-5, 0, build)
    for name, layer, shapes in (
        ("gated delta net, 32 heads of 128 x 128", delta, [(2048, 3), (2048, 3), (4096, 3), (32, 128 * 128)]),
        ("Mamba-2, 128 heads of 128 x 64", mamba, [(8192, 3), (128, 3), (128, 3), (128, 128 * 64)]),
    ):
        for parameter in layer.parameters():
            parameter.data.normal_(0.0, 0.02)
        told = [f"{rows} rows {_time_of(layer, shapes, rows, device):.2f} ms" for rows in (1, 4, 512, 8192)]
        print(f"- {name}: {', '.join(told)}")
    return True


def _time_of(layer: torch.nn.Module, shapes: Sequence[tuple[int, int]], rows: int, device: str) -> float:
    types = [torch.bfloat16] * 3 + [torch.float32]
    before = tuple(
        torch.zeros(1, *shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, types, strict=True)
    )

    class Cache:
        def scan(self, layer_id: int, recurrence: Callable[..., Any]) -> Any:
            return recurrence(before, ScanRows(np.array([0, rows], dtype=np.int32), np.array([rows - 1])))[0]

    x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16)
    taken = []
    with torch.inference_mode():
        for _ in range(8):
            torch.cuda.synchronize()
            started = time.perf_counter()
            layer(x, Cache())
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken[3:])

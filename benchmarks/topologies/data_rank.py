"""`python -m benchmarks.topologies.data_rank`: one data-parallel rank in its own process, which computes requests of
its own, with idle pauses. It reads its configuration from stdin and ends when stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import msgspec
import torch

from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest

_PAUSE_S = 0.05


async def busy(engine: AsyncEngine, seed: int = 0) -> None:
    """Answer random prompts one after the other, forever."""
    draw = random.Random(seed)
    for number in itertools.count():
        prompt = [draw.randrange(engine.info.vocab_size) for _ in range(draw.randrange(1, 60))]
        params = SamplingParams(max_tokens=draw.randrange(1, 12), temperature=0.0, ignore_eos=True)
        asked = GenerateRequest(request_id=f"own-{number}", prompt_token_ids=prompt, sampling_params=params)
        async for _ in engine.generate(asked):
            pass
        if number % 3 == 0:
            await asyncio.sleep(_PAUSE_S)


def main() -> None:
    """Run until stdin ends."""
    torch.set_num_threads(1)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    engine = AsyncEngine(config)
    engine.start()

    def end() -> None:
        sys.stdin.buffer.read()
        os._exit(0)  # a single rank cannot shut down in order

    threading.Thread(target=end, daemon=True).start()
    asyncio.run(busy(engine))


@contextlib.contextmanager
def beside(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start rank 0 of two data-parallel ranks with `settings`. Yields the settings of rank 1, which the
    caller makes.
    """
    with tempfile.TemporaryDirectory(prefix="baton-data-") as store:
        both = {"data_parallel_size": 2, "data_parallel_store": store}
        known = {field.name for field in fields(EngineConfig)}
        own = {name: value for name, value in settings.items() if name in known}
        config = EngineConfig(**{**own, **both, "engine_id": "beside"})
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.topologies.data_rank"], stdin=subprocess.PIPE)
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(asdict(config)) + b"\n")
            process.stdin.flush()
            yield {**both, "data_parallel_rank": 1}
        finally:
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    main()

"""Models with other caches than full attention: sliding windows, Mamba-2 states, latent vectors (MLA)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from benchmarks.vllm_servers import ONE_PROCESS
from tests.vllm.integration.checkpoints import deepseek, gemma3, mamba2
from tests.vllm.integration.servers import Mode, Pair, compare, reference, serve_pair, wait_idle

pytestmark = pytest.mark.timeout(900)

# The same kernel on all CPUs: with AMX vLLM would take AMX_MLA, for bfloat16 only.
MLA = "CPU_MLA"
MTP = {"method": "mtp", "num_speculative_tokens": 3, "attention_backend": MLA}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sliding window": (gemma3, {"prefill": ["--max-num-batched-tokens", "256"]}),
    "mamba-2": (mamba2, {"both": ["--no-enable-prefix-caching"]}),
    "mla with mtp": (deepseek, {"spec": MTP, "both": ["--attention-backend", MLA]}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    make, arguments = CASES[request.param]
    folder = tmp_path_factory.mktemp("hybrid")
    make(folder / "model")
    more = {**arguments, "both": [*ONE_PROCESS, *arguments.get("both", ())]}
    with serve_pair(folder, model=folder / "model", **more) as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, mode: Mode) -> None:
    async def run() -> None:
        rng = random.Random(mode)
        lengths = [2, 3, *range(15, 18), 31, 32, 33, *range(62, 100, 2), 95, 97, 300, 700]
        prompts = [[rng.randrange(3, 2000) for _ in range(length)] for length in lengths]
        async with aiohttp.ClientSession() as session:
            expected = [await reference(session, pair.decode, prompt, 24) for prompt in prompts]
        await compare(pair, prompts, 24, mode, expected)

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    # A prompt of 2 tokens hands over 1; nothing was computed instead of being handed over.
    assert pair.decode.metrics("vllm:baton_handoffs_total").keys() == {"committed"}

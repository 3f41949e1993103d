"""Models with other caches than full attention: sliding windows, Mamba-2 states, latent vectors (MLA)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from checkpoints import deepseek, gemma3, mamba2
from servers import Mode, Pair, accepted, handoff, reference, same, serve_pair, wait_idle

pytestmark = pytest.mark.timeout(900)

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sliding window": (gemma3, {"prefill": ["--max-num-batched-tokens", "256"]}),
    "mamba-2": (mamba2, {"prefill": ["--no-enable-prefix-caching"], "decode": ["--no-enable-prefix-caching"]}),
    "mla with mtp": (deepseek, {"spec": {"method": "mtp", "num_speculative_tokens": 3}}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    make, arguments = CASES[request.param]
    folder = tmp_path_factory.mktemp("hybrid")
    make(folder / "model")
    with serve_pair(folder, model=folder / "model", **arguments) as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, mode: Mode) -> None:
    async def run() -> None:
        rng = random.Random(mode)
        lengths = [2, 3, *range(15, 18), 31, 32, 33, *range(62, 100, 2), 95, 97, 300, 700]
        prompts = [[rng.randrange(3, 2000) for _ in range(length)] for length in lengths]
        async with aiohttp.ClientSession() as session:
            before = accepted(pair)
            expected = [await reference(session, pair.decode, prompt, 24) for prompt in prompts]
            between = accepted(pair)
            found = [(await handoff(session, pair, prompt, 24, mode))[1] for prompt in prompts]
            after = accepted(pair)
        verdicts = [same(tokens, *want) for tokens, want in zip(found, expected, strict=True)]
        assert False not in verdicts, dict(zip(lengths, zip(found, expected, strict=True), strict=True))
        alone = {position: between[position] - before.get(position, 0) for position in between}
        print(f"{mode}: {len(prompts)} prompts, {verdicts.count(None)} part at near-ties, accepted {alone}")
        if None not in verdicts:
            assert alone == {position: after[position] - between[position] for position in after}

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    # A prompt of 2 tokens hands over 1; nothing was computed instead of being handed over.
    assert pair.decode.metrics("vllm:baton_handoffs_total").keys() == {"committed"}

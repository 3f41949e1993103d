"""Every drafting method that the connector takes and other tests have not: EAGLE, a draft model, n-grams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from checkpoints import shallow
from servers import ROOT, Mode, Pair, compare, demo_prompts, reference, serve_pair, wait_idle

from baton.bench.vllm_servers import ONE_PROCESS

pytestmark = pytest.mark.timeout(900)

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle", "model": str(ROOT / "models" / "baton-demo-eagle")},
    "draft_model": {"method": "draft_model"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("drafters")
    spec = {**DRAFTERS[request.param], "num_speculative_tokens": 3}
    if request.param == "draft_model":
        shallow(folder / "draft")
        spec["model"] = str(folder / "draft")
    with serve_pair(folder, both=[*ONE_PROCESS, "--block-size", "32"], spec=spec) as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, mode: Mode) -> None:
    async def run() -> None:
        prompts = demo_prompts([2, 3, 31, 32, 33, 47, 63, 64, 65, 96, 97, 200, 333, 1000], seed=51)
        async with aiohttp.ClientSession() as session:
            expected = [await reference(session, pair.decode, prompt, 32) for prompt in prompts]
        await compare(pair, prompts, 32, mode, expected)

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    assert pair.decode.metrics("vllm:baton_handoffs_total").keys() == {"committed"}

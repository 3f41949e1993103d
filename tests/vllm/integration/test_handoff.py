"""One vLLM against two with a handoff between them: equal tokens, equal acceptance, no block left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from testkit.vllm.answers import Answer, same
from testkit.vllm.checks import alone_in_turn, leave_at_random
from testkit.vllm.servers import (
    EAGLE3,
    OWN_PROCESS,
    Mode,
    Pair,
    ask,
    compare,
    demo_prompts,
    handoff,
    reference,
    request,
    serve_pair,
    wait_idle,
)

pytestmark = pytest.mark.timeout(1800)

# Every residue of a block, block boundaries, several chunks.
PROMPTS = demo_prompts([2, 3, *range(33, 98), 500, 1000, 2050, 3000], seed=7)
CONFIGS: dict[str, dict[str, Any]] = {
    "no speculation": {"both": ["--block-size", "32", *OWN_PROCESS]},
    "whole pages": {"both": ["--block-size", "64"], "spec": EAGLE3},
    "block sizes 32 and 64, chunks of 256, digests": {
        "spec": EAGLE3,
        "prefill": ["--block-size", "32", "--max-num-batched-tokens", "256"],
        "decode": ["--block-size", "64"],
        "extra": {"granularity": "token", "integrity": "full"},
    },
}


# On such a CPU the layout of vLLM's pages is fully known, and each token in them has an address.
KERNEL = _get_attn_isa(torch.float32, 32)
BY_TOKEN = pytest.mark.skipif(
    KERNEL not in ("vec", "vec16"), reason=f"of the pages of vLLM's kernel {KERNEL!r} no token's place is known"
)
PARAMS = [
    pytest.param(config, id=name, marks=[BY_TOKEN] if "extra" in config else []) for name, config in CONFIGS.items()
]


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serve_pair(tmp_path_factory.mktemp("vllm"), **request.param) as found:
        yield found


@pytest.fixture(scope="module")
def alone(pair: Pair) -> list[Answer]:
    return asyncio.run(alone_in_turn(pair.decode, PROMPTS, 24))


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, alone: list[Answer], mode: Mode) -> None:
    asyncio.run(compare(pair, PROMPTS, 24, mode, alone))
    wait_idle(pair.prefill, pair.decode)
    ends = pair.decode.metrics("vllm:baton_handoffs_total")
    assert not any(end.startswith("failed_") for end in ends), ends


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_prefix_hits_orders_and_many_at_once(pair: Pair, mode: Mode) -> None:
    async def run() -> None:
        rng = random.Random(11)
        (base,) = demo_prompts([400], seed=12)
        cases = [
            (base[:cut] + [rng.randrange(3, 2000) for _ in range(tail)], 0.0)
            for cut in (31, 64, 399)
            for tail in (1, 40)
        ]
        cases += [([*base, rng.randrange(3, 2000)], late) for late in (-0.3, -0.02, 0.02, 0.3)]
        cases += [(base, 0.0), (base, 0.0)]
        async with aiohttp.ClientSession() as session:
            for prompt, late in cases:
                want = await reference(session, pair.prefill, prompt, 16)
                _, answer = await handoff(session, pair, prompt, 16, mode, late)
                assert same(answer, want) is not False
            prompts = demo_prompts([rng.randrange(2, 600) for _ in range(16)], seed=13)
            expected = [await reference(session, pair.prefill, prompt, 16) for prompt in prompts]
            found = await asyncio.gather(*(handoff(session, pair, prompt, 16, mode) for prompt in prompts))
            for (_, answer), want in zip(found, expected, strict=True):
                assert same(answer, want) is not False

    asyncio.run(run())
    assert pair.decode.metrics("vllm:prefix_cache_hits_total")["vllm:prefix_cache_hits_total"] > 0
    wait_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_fifty_aborts_leave_no_block_behind(pair: Pair, mode: Mode) -> None:
    leave_at_random(pair, 50, 5, 2600, [mode], (0.5, 0.1))


def test_hostile_params_change_nothing(pair: Pair) -> None:
    async def run() -> None:
        prompt = list(range(5, 105))
        async with aiohttp.ClientSession() as session:
            want = await reference(session, pair.decode, prompt, 8)
            for params in (
                {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [[1 << 40]]},
                {"baton": {"role": "decode", "ticket": "x" * 10000}},
                {"baton": [1, 2]},
            ):
                body = request(prompt, 8, cache_salt="hostile") | {"kv_transfer_params": params}
                assert (await ask(session, pair.decode, body))["choices"][0]["token_ids"] == want.tokens

    asyncio.run(run())

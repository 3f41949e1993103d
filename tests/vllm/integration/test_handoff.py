"""One vLLM against two with a handoff between them: equal tokens, equal acceptance, no block left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from servers import (
    EAGLE3,
    Mode,
    Pair,
    accepted,
    ask,
    demo_prompts,
    handoff,
    reference,
    request,
    same,
    serve_pair,
    wait_idle,
)

pytestmark = pytest.mark.timeout(900)

# Every residue of a block, blocks' ends, several chunks.
LENGTHS = [2, 3, *range(33, 98), 500, 1000, 2050, 3000]
CONFIGS: dict[str, dict[str, Any]] = {
    "no speculation": {"prefill": ["--block-size", "32"], "decode": ["--block-size", "32"]},
    "whole pages": {"prefill": ["--block-size", "64"], "decode": ["--block-size", "64"], "spec": EAGLE3},
    "block sizes 32 and 64, chunks of 256, digests": {
        "spec": EAGLE3,
        "prefill": ["--block-size", "32", "--max-num-batched-tokens", "256"],
        "decode": ["--block-size", "64"],
        "extra": {"granularity": "token", "integrity": "full"},
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serve_pair(tmp_path_factory.mktemp("vllm"), **CONFIGS[request.param]) as found:
        yield found


@dataclass(frozen=True)
class Alone:
    """What one vLLM says to prompts of all `LENGTHS`: tokens and margins, and accepted drafts by position."""

    prompts: list[list[int]]
    answers: list[tuple[list[int], list[float]]]
    accepted: dict[str, float]


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Alone:
    async def run() -> Alone:
        prompts = demo_prompts(LENGTHS, seed=7)
        async with aiohttp.ClientSession() as session:
            before = accepted(pair)
            answers = [await reference(session, pair.decode, prompt, 24) for prompt in prompts]
            after = accepted(pair)
        return Alone(prompts, answers, {position: after[position] - before.get(position, 0) for position in after})

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, alone: Alone, mode: Mode) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            before = accepted(pair)
            found = [await handoff(session, pair, prompt, 24, mode, salt=mode) for prompt in alone.prompts]
            after = accepted(pair)
        near_ties = 0
        for (first, tokens), (want, margins), length in zip(found, alone.answers, LENGTHS, strict=True):
            assert first == tokens[:1], f"{length} tokens: the engines disagree on the first token"
            verdict = same(tokens, want, margins)
            assert verdict is not False, f"{length} tokens: {tokens} instead of {want}"
            near_ties += verdict is None
        print(f"{mode}: {len(found)} prompts, {near_ties} part at near-ties, accepted {alone.accepted}")
        if not near_ties:
            assert alone.accepted == {position: after[position] - before[position] for position in after}
            assert not alone.accepted or sum(alone.accepted.values()) > len(found)

    asyncio.run(run())
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
                want, margins = await reference(session, pair.prefill, prompt, 16)
                _, tokens = await handoff(session, pair, prompt, 16, mode, late)
                assert same(tokens, want, margins) is not False
            prompts = demo_prompts([rng.randrange(2, 600) for _ in range(16)], seed=13)
            expected = [await reference(session, pair.prefill, prompt, 16) for prompt in prompts]
            found = await asyncio.gather(*(handoff(session, pair, prompt, 16, mode) for prompt in prompts))
            for (_, tokens), (want, margins) in zip(found, expected, strict=True):
                assert same(tokens, want, margins) is not False

    asyncio.run(run())
    assert pair.decode.metrics("vllm:prefix_cache_hits_total")["vllm:prefix_cache_hits_total"] > 0
    wait_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_fifty_aborts_leave_no_block_behind(pair: Pair, mode: Mode) -> None:
    async def run() -> None:
        rng = random.Random(17)
        async with aiohttp.ClientSession() as session:

            async def one(which: int) -> None:
                prompt = [rng.randrange(3, 2000) for _ in range(rng.randrange(200, 2600))]
                # A decode server that never saw its leg cannot say so: then the ticket's end frees the blocks.
                ticket = pair.ticket(prompt, mode, life_s=8)
                bodies = [
                    (pair.prefill, request(prompt, 1, {"role": "prefill", "ticket": ticket})),
                    (pair.decode, request(prompt, 60, {"role": "decode", "ticket": ticket})),
                ]
                legs = [asyncio.create_task(ask(session, server, body)) for server, body in bodies]
                await asyncio.sleep(rng.random() * 0.5)
                legs[which % 2].cancel()
                await asyncio.sleep(rng.random() * 0.1)
                legs[1 - which % 2].cancel()
                await asyncio.gather(*legs, return_exceptions=True)

            for start in range(0, 50, 5):
                await asyncio.gather(*(one(start + index) for index in range(5)))

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)


def test_hostile_params_change_nothing(pair: Pair) -> None:
    async def run() -> None:
        prompt = list(range(5, 105))
        async with aiohttp.ClientSession() as session:
            want, _ = await reference(session, pair.decode, prompt, 8)
            for params in (
                {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [[1 << 40]]},
                {"baton": {"role": "decode", "ticket": "x" * 10000}},
                {"baton": [1, 2]},
            ):
                body = request(prompt, 8, cache_salt="hostile") | {"kv_transfer_params": params}
                assert (await ask(session, pair.decode, body))["choices"][0]["token_ids"] == want

    asyncio.run(run())

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

from baton.router import RouterConfig, build_app
from testkit.servers.fake_serving import await_engines, served
from testkit.vllm.answers import Answer, same, same_acceptance
from testkit.vllm.checkpoints import lora
from testkit.vllm.checks import alone_in_turn, leave_at_random
from testkit.vllm.servers import (
    EAGLE3,
    IDENTIFY,
    LIMIT_S,
    OWN_PROCESS,
    Mode,
    Pair,
    ask,
    compare,
    demo_prompts,
    handoff,
    outcomes,
    reference,
    request,
    serve_pair,
    wait_idle,
)

pytestmark = pytest.mark.timeout(1800)

# Every residue of a block, block boundaries, several chunks.
PROMPTS = demo_prompts([2, 3, *range(33, 98), 500, 1000, 2050, 3000], seed=7)
MODES: list[Mode] = ["push", "pull"]
LORA = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules"]
CONFIGS: dict[str, dict[str, Any]] = {
    "whole pages": {"both": ["--block-size", "64", *LORA], "spec": EAGLE3},
    "no speculation": {"both": ["--block-size", "32", *OWN_PROCESS]},
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
    folder, config = tmp_path_factory.mktemp("vllm"), dict(request.param)
    if LORA[0] in config.get("both", ()):
        for seed, name in enumerate(("one", "two", "other two")):
            lora(folder / name, seed)
        for side, two in (("prefill", "two"), ("decode", "other two")):
            config[side] = [f"one={folder}/one", f"two={folder}/{two}"]
    with serve_pair(folder, **config) as found:
        yield found


OF_PAGES = pytest.mark.parametrize("pair", [CONFIGS["whole pages"]], indirect=True)


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
    leave_at_random([pair], 50, 5, 2600, [mode], (0.5, 0.1))


@OF_PAGES
@pytest.mark.parametrize(("name", "outcome"), [("one", "committed"), ("two", "refused")])
def test_an_adapter_is_handed_off_if_both_servers_have_its_files(pair: Pair, name: str, outcome: str) -> None:
    """Other files of the same name: the decode server, whose files the ticket does not name, computes all itself."""
    prompts = demo_prompts([33, 64, 65, 200, 700], seed=71)
    life_s = LIMIT_S if outcome == "committed" else 3.0  # a prefill server waits so long for one that refused

    async def alone(session: aiohttp.ClientSession, model: str) -> list[Answer]:
        more = {"model": model, "cache_salt": "alone", "logprobs": 2, "return_tokens_as_token_ids": True}
        return [Answer.of(await ask(session, pair.decode, request(prompt, 24, **more))) for prompt in prompts]

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            told = await ask(session, pair.prefill, request([5], 1, IDENTIFY, model=name))
            adapter = told["kv_transfer_params"]["baton"]["adapter"]
            expected, plain = [await alone(session, model) for model in (name, "demo")]
            assert [one.tokens for one in expected] != [one.tokens for one in plain], "the adapter changes nothing"
            for index, (prompt, want) in enumerate(zip(prompts, expected, strict=True)):
                ticket = pair.ticket(prompt, MODES[index % 2], life_s, adapter)
                bodies = [
                    request(prompt, num, {"role": role, "ticket": ticket}, model=name, cache_salt="legs")
                    for role, num in (("prefill", 1), ("decode", 24))
                ]
                legs = zip((pair.prefill, pair.decode), bodies, strict=True)
                first, found = [Answer.of(body) for body in await asyncio.gather(*(ask(session, *leg) for leg in legs))]
                assert same(found, want) is not False
                if outcome == "committed":
                    assert first.tokens == found.tokens[:1]
                    assert same_acceptance(found, want, pair.decode.identity["num_speculative_tokens"])

    before = outcomes(pair.decode)
    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    assert outcomes(pair.decode, before) == {outcome: len(prompts)}


@OF_PAGES
def test_the_router_hands_off_an_adapter_of_one_content(pair: Pair) -> None:
    prompts = demo_prompts([64, 200], seed=72)

    async def run() -> None:
        p, d = pair.prefill, pair.decode
        settings = RouterConfig(prefill=(p.url,), decode=(d.url,), ticket_key=p.key, engine="vllm")
        async with served(await build_app(settings)) as url, aiohttp.ClientSession() as session:
            await await_engines(session, url)
            for prompt in prompts:
                body = request(prompt, 24, model="one")
                want = Answer.of(await ask(session, d, body | {"cache_salt": "alone", "logprobs": 2}))
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    assert same(Answer.of(await response.json()), want) is not False
            async with session.post(f"{url}/v1/completions", json=request([5], 1, model="two")) as response:
                assert response.status == 404

    before = outcomes(pair.decode)
    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    assert outcomes(pair.decode, before) == {"committed": len(prompts)}


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

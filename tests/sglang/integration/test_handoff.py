"""A prefill and a decode server of SGLang, and one SGLang that does both: equal tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.wire import Mode
from testkit.sglang.servers import (
    MODEL,
    Config,
    Pair,
    Server,
    ask,
    handoff,
    pair_configs,
    prompts,
    serve,
    session,
    ticket_key,
)

pytestmark = pytest.mark.timeout(900)
NUM = 12


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Server]]:
    """Started by SGLang's own command; other tests' servers are forks of one process."""
    folder = tmp_path_factory.mktemp("sglang")
    configs = [replace(config, forked=False) for config in [*pair_configs(folder), Config("one")]]
    with serve(folder, configs) as (prefill, decode, one):
        yield Pair(prefill, decode, ticket_key(folder)), one


def test_one_server_is_as_exact_as_transformers(servers: tuple[Pair, Server]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    async def run() -> None:
        async with session() as http:
            for prompt in prompts([1, 7, 64], seed=1):
                output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM, do_sample=False, pad_token_id=0)
                answer = await ask(http, servers[1], prompt, NUM)
                assert answer["output_ids"] == output[0, len(prompt) :].tolist()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_handoff_changes_no_token(servers: tuple[Pair, Server], mode: Mode) -> None:
    pair, one = servers

    async def run() -> None:
        async with session() as http:
            for prompt in prompts([1, 2, 15, 16, 17, 33, 300], seed=2 if mode == "push" else 3):
                want = await ask(http, one, prompt, NUM)
                assert await handoff(http, pair, prompt, NUM, mode) == want["output_ids"]

    before = pair.decode.counts().get("committed", 0)
    asyncio.run(run())
    assert pair.decode.counts()["committed"] == before + 7


@pytest.mark.parametrize("late", [1.0, -1.0])
def test_either_leg_may_come_first(servers: tuple[Pair, Server], late: float) -> None:
    pair, one = servers

    async def run() -> None:
        async with session() as http:
            (prompt,) = prompts([40], seed=4)
            want = await ask(http, one, prompt, NUM)
            assert await handoff(http, pair, prompt, NUM, "push", late) == want["output_ids"]

    asyncio.run(run())

"""One vLLM against two, the first of which sends each layer of a prompt while it computes the next ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest

from testkit.vllm.answers import Answer, same
from testkit.vllm.checks import alone_in_turn, leave_at_random
from testkit.vllm.servers import (
    EAGLE3,
    Pair,
    Server,
    compare,
    demo_prompts,
    handoff,
    reference,
    serve,
    wait_idle,
)

pytestmark = pytest.mark.timeout(1800)
PROMPTS = demo_prompts([2, 31, 32, 33, 65, 200, 300, 600], seed=31)
CHUNKS = ["--max-num-batched-tokens", "256"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    configs = [("P", "kv_producer", CHUNKS), ("E", "kv_producer", CHUNKS), ("D", "kv_consumer", [])]
    hooks = {"P": "layer_hooks.Waiting", "E": "layer_hooks.Early"}
    folder = tmp_path_factory.mktemp("vllm")
    with serve(folder, configs, {"kv_stream": "layer"}, EAGLE3, hooks=hooks) as found:
        yield found


@pytest.fixture(scope="module")
def alone(servers: list[Server]) -> list[Answer]:
    return asyncio.run(alone_in_turn(servers[-1], PROMPTS, 24))


def test_tokens_and_acceptance_are_those_of_one_vllm(servers: list[Server], alone: list[Answer]) -> None:
    p, _, d = servers
    asyncio.run(compare(Pair(p, d), PROMPTS, 24, "push", alone))
    wait_idle(p, d)
    ends = d.metrics("vllm:baton_handoffs_total")
    assert not any(end.startswith("failed_") for end in ends), ends


def test_a_layer_that_is_told_before_it_is_written_is_seen(servers: list[Server], alone: list[Answer]) -> None:
    """Otherwise the test above would prove nothing."""
    _, early, d = servers

    async def run() -> list[bool | None]:
        async with aiohttp.ClientSession() as session:
            pair, found = Pair(early, d), []
            for prompt, want in zip(PROMPTS, alone, strict=True):
                _, answer = await handoff(session, pair, prompt, 24, "push", salt="early")
                found.append(same(answer, want))
            return found

    assert False in asyncio.run(run())


def test_aborts_between_layers_leave_no_block_behind(servers: list[Server]) -> None:
    p, _, d = servers
    leave_at_random([Pair(p, d)], 12, 3, 600, ["push"], (1.0, 0.2))
    asyncio.run(_again(Pair(p, d)))


async def _again(pair: Pair) -> None:
    """Late bytes of aborted copies overwrite no tokens."""
    async with aiohttp.ClientSession() as session:
        for prompt in demo_prompts([150, 400], seed=32):
            want = await reference(session, pair.decode, prompt, 16)
            _, answer = await handoff(session, pair, prompt, 16, "push", salt="again")
            assert same(answer, want) is not False

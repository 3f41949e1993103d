"""Every drafting method that the connector takes and other tests do not cover: EAGLE, a draft model, DFlash, n-grams.
With caches for one long request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from testkit.vllm.answers import Answer, same
from testkit.vllm.checkpoints import shallow
from testkit.vllm.checks import check_all_are_handed_over
from testkit.vllm.drafters.heads import DFLASH
from testkit.vllm.servers import (
    ROOT,
    Mode,
    Pair,
    Server,
    ask,
    demo_prompts,
    reference,
    request,
    serve_pair,
    wait_idle,
)

pytestmark = pytest.mark.timeout(1800)

FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", "40", "--max-model-len", "1152"]

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle", "model": str(ROOT / "models" / "baton-demo-eagle")},
    "draft_model": {"method": "draft_model"},
    "dflash": DFLASH,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("drafters")
    spec = {**DRAFTERS[request.param], "num_speculative_tokens": 3}
    if request.param == "draft_model":
        shallow(folder / "draft")
        spec["model"] = str(folder / "draft")
    with serve_pair(folder, both=FLAGS, spec=spec) as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, mode: Mode) -> None:
    lengths = [2, 3, 31, 32, 33, 47, 63, 64, 65, 96, 97, 200, 333, 1000]
    check_all_are_handed_over(pair, demo_prompts(lengths, seed=51), 32, mode)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_legs_that_arrive_in_another_order_do_not_wait_for_each_other(pair: Pair, mode: Mode) -> None:
    """The prefill server's blocks all belong to one request, which frees them only once the decode server has blocks
    for it. The decode server gets the other request first, which waits for blocks at the prefill server.
    """

    async def run() -> None:
        prompts = demo_prompts([700, 700], seed=53)
        tickets = [pair.ticket(prompt, mode) for prompt in prompts]

        async with aiohttp.ClientSession() as session:

            def leg(server: Server, role: str, which: int) -> asyncio.Task[dict[str, Any]]:
                params = {"role": role, "ticket": tickets[which]}
                body = request(prompts[which], 8 if role == "decode" else 1, params, cache_salt=mode)
                return asyncio.create_task(ask(session, server, body))

            expected = [await reference(session, pair.decode, prompt, 8) for prompt in prompts]
            second = leg(pair.decode, "decode", 1)
            await asyncio.sleep(0.5)
            await leg(pair.prefill, "prefill", 0)
            late = leg(pair.prefill, "prefill", 1)
            await asyncio.sleep(0.5)
            answers = [Answer.of(await task) for task in (leg(pair.decode, "decode", 0), second)]
            await late
        assert all(same(found, want) is not False for found, want in zip(answers, expected, strict=True))

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    assert pair.decode.metrics("vllm:baton_handoffs_total").keys() == {"committed"}

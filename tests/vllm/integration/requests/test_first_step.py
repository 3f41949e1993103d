"""`first_step` "verify", the default, over real servers: the decode server's first step returns the first two tokens,
and the answer is one vLLM's, with whatever a request asks for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from testkit.vllm.answers import Answer, same
from testkit.vllm.servers import EAGLE3, Mode, Pair, ask, demo_prompts, request, serve_pair, wait_idle

pytestmark = pytest.mark.timeout(1800)

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "grammar": {"structured_outputs": {"regex": "[a-z ]{3,60}"}, "ignore_eos": False},
    "stop": {"stop": ["e"], "ignore_eos": False},
    "bad words": {"bad_words": ["self", "the"]},
}
ASKED = {"logprobs": 2, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    both = ["--block-size", "32", "--num-gpu-blocks-override", "96", "--max-model-len", "1152"]
    with serve_pair(tmp_path_factory.mktemp("first"), both=both, extra={"first_step": None}, spec=EAGLE3) as found:
        yield found


def rounds(accepted: Sequence[int]) -> dict[int, int]:
    """The drafts that each verification accepted, by the number of tokens before it."""
    found, start = {}, 0
    for number in accepted:
        found[start] = number
        start += number + 1
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_one_vllms(pair: Pair, name: str) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            for index, prompt in enumerate(demo_prompts([2, 31, 32, 33, 64, 65, 200, 1000], seed=57)):
                mode: Mode = "pull" if index % 2 else "push"
                await check(session, prompt, mode)

    async def check(session: aiohttp.ClientSession, prompt: list[int], mode: Mode) -> None:
        more = {**REQUESTS[name], **ASKED}
        expected = Answer.of(
            await ask(session, pair.decode, request(prompt, 24, **more, cache_salt=secrets.token_hex(8)))
        )
        salt, ticket = secrets.token_hex(8), pair.ticket(prompt, mode)
        legs = [(pair.prefill, "prefill", 1), (pair.decode, "decode", 24)]
        bodies = [
            request(prompt, num, {"role": role, "ticket": ticket}, **more, cache_salt=salt) for _, role, num in legs
        ]
        first, found = [
            Answer.of(answer)
            for answer in await asyncio.gather(*(ask(session, leg[0], b) for leg, b in zip(legs, bodies, strict=True)))
        ]
        where = f"{name}, {len(prompt)} tokens: {found} instead of {expected}"
        assert first.tokens == found.tokens[:1], where
        assert len(found.tokens) == len(expected.tokens) or not same(found, expected), where
        assert same(found, expected) is not False, where
        # vLLM tells no rounds of an answer that ends by a stop string.
        if same(found, expected) and found.accepted:
            assert found.accepted[:1] == [1], where
            if name == "grammar":
                return  # a step whose drafts the grammar forbids is no round
            ours, theirs = rounds(found.accepted), rounds([0, *expected.accepted])
            common = ours.keys() & theirs.keys() - {0}
            assert all(ours[start] == theirs[start] for start in common), where
            assert common or len(found.tokens) < 12, where

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)
    assert pair.decode.metrics("vllm:baton_handoffs_total").keys() == {"committed"}

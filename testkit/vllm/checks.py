"""Checks shared by many tests of a pair of vLLM servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import aiohttp

from testkit.vllm.answers import Answer
from testkit.vllm.servers import Mode, Pair, Server, ask, ask_once, compare, reference, request, wait_idle


async def alone(server: Server, prompts: Sequence[Sequence[int]], num: int = 20) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(reference(session, server, prompt, num) for prompt in prompts)))


async def alone_in_turn(server: Server, prompts: Sequence[Sequence[int]], num: int) -> list[Answer]:
    """One vLLM's answers to prompts one after the other, as `compare` sends them."""
    async with aiohttp.ClientSession() as session:
        return [await reference(session, server, prompt, num) for prompt in prompts]


def check_all_are_handed_over(pair: Pair, prompts: Sequence[Sequence[int]], num: int, mode: Mode) -> None:
    """Tokens and acceptance are those of one vLLM, and no handoff was replaced by a computation."""
    key = (tuple(map(tuple, prompts)), num)
    if key not in pair.known:
        pair.known[key] = asyncio.run(alone_in_turn(pair.decode, prompts, num))
    asyncio.run(compare(pair, prompts, num, mode, pair.known[key]))
    wait_idle(pair.prefill, pair.decode)
    assert pair.decode.metrics("vllm:baton_handoffs_total").keys() == {"committed"}


def leave_at_random(
    pairs: Sequence[Pair],
    num: int,
    at_once: int,
    longest: int,
    modes: Sequence[Mode],
    pauses: tuple[float, float] = (0.6, 0.1),
) -> None:
    """Clients of both legs of `num` requests leave, `pauses` seconds apart at most. Afterwards no block is held. The
    requests take `pairs` in turn.
    """

    async def one(session: aiohttp.ClientSession, which: int) -> None:
        rng, pair = random.Random(which), pairs[which % len(pairs)]
        prompt = [rng.randrange(3, 2000) for _ in range(rng.randrange(200, longest))]
        # A decode server that never saw its leg cannot report this: then the ticket's expiry frees the blocks.
        ticket = pair.ticket(prompt, modes[which // 2 % len(modes)], life_s=8)
        bodies = [
            (pair.prefill, pair.prefill_leg(prompt, ticket)),
            (pair.decode, request(prompt, 60, {"role": "decode", "ticket": ticket})),
        ]
        legs = [asyncio.create_task(ask(session, server, body)) for server, body in bodies]
        await asyncio.sleep(rng.random() * pauses[0])
        legs[which % 2].cancel()
        await asyncio.sleep(rng.random() * pauses[1])
        legs[1 - which % 2].cancel()
        await asyncio.gather(*legs, return_exceptions=True)

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            for start in range(0, num, at_once):
                await asyncio.gather(*(one(session, start + index) for index in range(at_once)))

    servers = [server for pair in pairs for server in (pair.prefill, pair.decode)]
    asyncio.run(run())
    wait_idle(*servers)
    # vLLM reports a connector's counts after a step: without one, a later test would count these legs.
    for server in servers:
        asyncio.run(ask_once(server, request([5], 1)))

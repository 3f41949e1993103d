"""Copies that fail: tried again, and where that does not help, what `kv_load_failure_policy` says. Never other tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest
from servers import Pair, ask, demo_prompts, handoff, reference, request, same, serve, wait_idle

from baton.handoff.ticket import load_or_create_key

pytestmark = pytest.mark.timeout(900)

LENGTHS = [40, 333, 1000, 1500]
# Pushed copies fail now and then; those that a decode server pulls always do.
FAULTS = {"P": "faulty+nixl://?fault=fail&every=3", "D": "faulty+nixl://?fault=fail", "F": "faulty+nixl://?fault=fail"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Pair]]:
    """A prefill server with a decode server that recomputes, and with one that fails."""
    folder = tmp_path_factory.mktemp("faults")
    key = load_or_create_key(folder / "ticket.key")
    chunks = ["--max-num-batched-tokens", "256"]
    configs = [("P", "kv_producer", chunks), ("D", "kv_consumer", ()), ("F", "kv_consumer", ())]
    own = {name: {"kv_transport": uri} for name, uri in FAULTS.items()}
    with serve(folder, configs, {}, own=own, policy={"F": "fail"}) as (p, d, f):
        pair = Pair(p, d, key)
        yield pair, replace(pair, decode=f)


def test_failed_copies_are_issued_again(pairs: tuple[Pair, Pair]) -> None:
    for pair in pairs:
        asyncio.run(_exact(pair, "push"))
        wait_idle(pair)
        assert pair.decode.metrics("vllm:baton_handoffs_total") == {"committed": len(LENGTHS)}


def test_without_a_copy_the_decode_server_recomputes(pairs: tuple[Pair, Pair]) -> None:
    pair, _ = pairs
    asyncio.run(_exact(pair, "pull"))
    wait_idle(pair)
    assert pair.decode.metrics("vllm:baton_handoffs_total")["failed_transfer_failed"] == len(LENGTHS)


def test_without_a_copy_the_request_ends_in_an_error(pairs: tuple[Pair, Pair]) -> None:
    _, pair = pairs

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            for prompt in demo_prompts(LENGTHS, seed=43):
                ticket = pair.ticket(prompt, "pull")
                prefill = ask(session, pair.prefill, request(prompt, 1, {"role": "prefill", "ticket": ticket}))
                decode = ask(session, pair.decode, request(prompt, 8, {"role": "decode", "ticket": ticket}))
                _, end = await asyncio.gather(prefill, decode, return_exceptions=True)
                print("END", repr(end)[:300])

    asyncio.run(run())
    wait_idle(pair)


async def _exact(pair: Pair, mode: str) -> None:
    async with aiohttp.ClientSession() as session:
        for prompt in demo_prompts(LENGTHS, seed=41):
            want, margins = await reference(session, pair.prefill, prompt, 16)
            first, tokens = await handoff(session, pair, prompt, 16, mode)
            assert first == tokens[:1]
            assert same(tokens, want, margins) is not False

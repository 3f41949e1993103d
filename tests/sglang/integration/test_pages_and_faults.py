"""Servers with unequal page sizes, chunks, prefix hits, clients that leave, and killed servers."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from testkit.sglang.servers import Pair, greedy, handoff, prompts, serve_pair, session, wait_idle

pytestmark = pytest.mark.timeout(1200)
NUM = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """P computes in chunks and keeps prefixes; D has other pages and checks digests of everything."""
    prefill = ["--page-size", "16", "--chunked-prefill-size", "64"]
    settings = {"integrity": "full", "lease": 5.0}
    with serve_pair(tmp_path_factory.mktemp("pages"), prefill, settings=settings) as (found, _):
        yield found


def test_every_residue_of_the_prompts_length_in_both_modes(pair: Pair) -> None:
    """Field classes B and E: a shifted block, or an entry that stays behind, changes the tokens."""
    found = prompts([*range(1, 18), 63, 64, 65, 130], seed=5)
    want = greedy(found, NUM)

    async def run() -> None:
        async with session() as http:
            for index, prompt in enumerate(found):
                mode = "push" if index % 2 else "pull"
                assert await handoff(http, pair, prompt, NUM, mode) == want[index], f"{len(prompt)} tokens, {mode}"

    before = pair.decode.counts()
    asyncio.run(run())
    after = pair.decode.counts()
    assert after["committed"] == before.get("committed", 0) + len(found)
    assert after["bytes"] > before.get("bytes", 0)


def test_clients_that_leave_change_no_other_answer_and_leave_no_page_behind(pair: Pair) -> None:
    """Field classes F and K."""
    found = prompts([3, 16, 40, 64, 90, 129], seed=6)
    want = greedy(found, NUM)
    rng = random.Random(1)

    async def one(http: object, index: int, turn: asyncio.Semaphore) -> None:
        async with turn:
            which = index % len(found)
            task = asyncio.ensure_future(handoff(http, pair, found[which], NUM, "push" if index % 3 else "pull"))  # type: ignore[arg-type]
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.3)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert await task == want[which]

    async def run() -> None:
        async with session() as http:
            turn = asyncio.Semaphore(6)
            await asyncio.gather(*(one(http, index, turn) for index in range(60)))

    asyncio.run(run())
    wait_idle(pair.prefill, pair.decode)


def test_a_killed_prefill_server_ends_its_requests_by_name_and_frees_the_decode_servers_pages(pair: Pair) -> None:
    """Field class H. The last test of this pair."""
    prompt = prompts([2000], seed=7)[0]

    async def run() -> None:
        async with session() as http:
            asking = asyncio.ensure_future(handoff(http, pair, prompt, NUM, "push"))
            while pair.prefill.counts().get("prefill_committed", 0) == 0:
                await asyncio.sleep(0.1)
            pair.prefill.signal(signal.SIGKILL)
            with pytest.raises(Exception):  # noqa: B017 - the connection to P is gone
                await asking

    asyncio.run(run())
    wait_idle(pair.decode)

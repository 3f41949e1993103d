"""Servers with different numbers of tensor ranks."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import get_args

import pytest

from baton.wire import Mode
from testkit.sglang.servers import (
    Pair,
    check_whole,
    greedy,
    outcome,
    prompts,
    serve_pair,
    session,
)

pytestmark = pytest.mark.timeout(1800)
NUM = 12
TWO = ["--tp-size", "2", "--disable-custom-all-reduce"]


async def answers(pair: Pair, found: list[list[int]], mode: Mode) -> list[list[int] | str]:
    legs = pair.minter(mode)
    async with session() as http:
        return await asyncio.gather(*(outcome(http, pair, prompt, NUM, legs) for prompt in found))


@pytest.mark.parametrize(("prefill", "decode"), [(TWO, []), ([], TWO)], ids=["2 to 1", "1 to 2"])
def test_tensor_ranks_hand_over_every_head(tmp_path: Path, prefill: list[str], decode: list[str]) -> None:
    """The side with two ranks has the larger pages. A request whose peer dies fails on all ranks, and all have their
    pages again."""
    found = prompts([1, 15, 16, 17, 40, 130], seed=21)
    want = greedy(found, NUM)
    sizes = [["--page-size", "16"] if flags else [] for flags in (prefill, decode)]
    settings = {"integrity": "full", "lease": 5.0}
    with serve_pair(tmp_path, [*prefill, *sizes[0]], [*decode, *sizes[1]], settings=settings) as (pair, _):
        for server, flags in ((pair.prefill, prefill), (pair.decode, decode)):
            assert len(server.identity().control_addresses) == (2 if flags else 1)
        for mode in get_args(Mode):
            assert asyncio.run(answers(pair, found, mode)) == want
        check_whole(pair.prefill, pair.decode)
        dead, alive = (pair.decode, pair.prefill) if prefill else (pair.prefill, pair.decode)

        async def kill() -> list[list[int] | str]:
            asked = asyncio.ensure_future(answers(pair, found, "push"))
            await asyncio.sleep(0.3)
            dead.signal(signal.SIGKILL)
            return await asked

        for answer, known in zip(asyncio.run(kill()), want, strict=True):
            assert isinstance(answer, str) or answer == known
        check_whole(alive)

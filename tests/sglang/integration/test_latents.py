"""A DeepSeek model with latents (MLA) and experts, over servers with unequal pages: tokens are transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest

from baton.wire import Mode
from testkit.sglang.launch import ROOT
from testkit.sglang.servers import Pair, check_whole, demo_prompts, greedy, outcome, serve_pair, session

pytestmark = pytest.mark.timeout(1800)
MODEL = ROOT / "models" / "baton-demo-deepseek"
NUM = 12


async def answers(pair: Pair, found: list[list[int]], mode: Mode) -> list[list[int] | str]:
    legs = pair.minter(mode)
    async with session() as http:
        return [await outcome(http, pair, prompt, NUM, legs) for prompt in found]


def test_latents_are_handed_over(tmp_path: Path) -> None:
    found = demo_prompts([1, 5, 16, 17, 33, 64], seed=1)
    want = greedy(found, NUM, MODEL)
    with serve_pair(tmp_path, ["--page-size", "16"], settings={"integrity": "full"}, model=MODEL) as (pair, _):
        for mode in get_args(Mode):
            assert asyncio.run(answers(pair, found, mode)) == want
        check_whole(pair.prefill, pair.decode)

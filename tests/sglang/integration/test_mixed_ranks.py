"""A DeepSeek model with latents and an EAGLE-3 head with heads of its own (sgl-project/sglang#20698), between servers
with different numbers of ranks: tokens, and how many drafts are accepted, are those of one SGLang with one rank."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from baton.wire import Mode
from testkit.sglang.drafts import compare, draft_flags, drafter, one_answer
from testkit.sglang.launch import ROOT
from testkit.sglang.servers import Config, Pair, check_whole, demo_prompts, serve, serve_pair

pytestmark = pytest.mark.timeout(1800)
MODEL = ROOT / "models" / "baton-demo-deepseek"
NUM = 24
LENGTHS = [5, 16, 17, 90]
TENSOR = ["--tp-size", "2", "--disable-custom-all-reduce"]
DATA = [*TENSOR, "--attn-dp-size", "2"]
RANKS: dict[str, tuple[list[str], list[str]]] = {
    "TP 2 to 1": (TENSOR, []),
    "TP 1 to 2": ([], TENSOR),
    "attention-DP 2 to 1": (DATA, []),
    "attention-DP 1 to 2": ([], DATA),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return draft_flags("EAGLE3", drafter(tmp_path_factory.mktemp("head"), "baton-demo-deepseek-eagle3"))


@pytest.fixture(scope="module")
def known(
    flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[Mode, tuple[list[list[int]], list[dict[str, Any]]]]:
    """Prompts and one server's answers to them."""
    with serve(tmp_path_factory.mktemp("one"), [Config("one", flags)], MODEL) as (one,):
        found = {mode: demo_prompts(LENGTHS, seed) for seed, mode in enumerate(get_args(Mode))}
        return {mode: (prompts, asyncio.run(one_answer(one, prompts, NUM))) for mode, prompts in found.items()}


def data_ranks(pair: Pair, prefill: list[str], decode: list[str]) -> Iterator[Pair]:
    """Field class J: each data-parallel rank is an engine, which the ticket names."""
    if DATA not in (prefill, decode):
        yield pair
        return
    for rank in range(2):
        name = "prefill" if prefill == DATA else "decode"
        server = replace(getattr(pair, name), data_rank=rank)
        assert server.identity().engine_id == f"{server.name}_dp{rank}"
        yield replace(pair, **{name: server})


@pytest.mark.parametrize(("prefill", "decode"), RANKS.values(), ids=RANKS)
def test_a_head_with_heads_goes_on_beside_latents(
    tmp_path: Path,
    flags: list[str],
    known: dict[Mode, tuple[list[list[int]], list[dict[str, Any]]]],
    prefill: list[str],
    decode: list[str],
) -> None:
    settings = {"integrity": "full"}
    with serve_pair(tmp_path, prefill, decode, settings, flags, MODEL) as (pair, _):
        for each in data_ranks(pair, prefill, decode):
            for mode, (prompts, answers) in known.items():
                compared = asyncio.run(compare(each, answers, mode, prompts, NUM))
                print(f"{mode}: {compared}")
                assert not compared.differing
                assert compared.accepted[0] > 0
            check_whole(each.prefill, each.decode)

"""Caches that tensor ranks share otherwise than by heads, on real servers: states (Mamba-2), latents (MLA)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.integration.answers import Answer
from tests.vllm.integration.checkpoints import deepseek, mamba2
from tests.vllm.integration.servers import Mode, Pair, Server, demo_prompts, serve, wait_idle
from tests.vllm.integration.test_hybrid import MLA, MTP
from tests.vllm.integration.test_ranks import all_of, alone, check, outcomes, ranks

pytestmark = pytest.mark.timeout(900)
PROMPTS = demo_prompts([2, 3, *range(15, 18), 31, 32, 33, *range(62, 67), 95, 97, 300, 700], seed=61)
CASES: dict[str, tuple[Callable[[Path], None], list[str], Any]] = {
    "mamba-2": (mamba2, ["--no-enable-prefix-caching", "--block-size", "128"], None),
    "mla with mtp": (deepseek, ["--attention-backend", MLA], MTP),
}
Fleet = dict[str, Server]


@pytest.fixture(scope="module", params=CASES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers of two tensor ranks, one of one rank."""
    make, arguments, spec = CASES[request.param]
    folder = tmp_path_factory.mktemp("hybrid")
    make(folder / "model")
    kinds = {"TWO": ranks("tensor", 2), "OTHER": ranks("tensor", 2), "ONE": []}
    configs = [(name, "kv_both", [*arguments, *own]) for name, own in kinds.items()]
    with serve(folder, configs, {}, spec, folder / "model") as servers:
        yield dict(zip(kinds, servers, strict=True))


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[Answer]:
    return asyncio.run(alone(fleet["ONE"], PROMPTS))


@pytest.mark.parametrize(
    ("source", "dest", "modes"),
    [("TWO", "OTHER", ("push", "pull")), ("TWO", "ONE", ("pull", "push")), ("ONE", "TWO", ("push", "pull"))],
)
def test_tokens_and_acceptance_are_those_of_one_vllm(
    fleet: Fleet, expected: list[Answer], source: str, dest: str, modes: Sequence[Mode]
) -> None:
    pair = Pair(fleet[source], fleet[dest])
    before = outcomes(pair.decode)
    check(
        asyncio.run(all_of(pair, PROMPTS, modes, source + dest)),
        expected,
        pair.decode.identity["num_speculative_tokens"],
    )
    wait_idle(pair.prefill, pair.decode)
    assert outcomes(pair.decode, before) == {"committed": len(PROMPTS)}

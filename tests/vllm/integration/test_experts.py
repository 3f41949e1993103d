"""Data-parallel ranks of a model with experts, which compute in step: each is an engine of its own. With a drafter they
are tested as if vLLM wrote nothing in a rank's dummy steps (`collectives`), and refused with vLLM as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from testkit.vllm.answers import Answer
from testkit.vllm.checkpoints import gpt_oss
from testkit.vllm.servers import EAGLE3, Pair, Server, demo_prompts, serve, wait_idle
from tests.vllm.integration.test_ranks import abort_at_random, all_of, alone, check, outcomes

pytestmark = pytest.mark.timeout(1800)
PROMPTS = demo_prompts([2, 3, 31, 32, 33, *range(62, 70), 95, 97, 300, 700], seed=61)
Fleet = dict[str, Server]


@pytest.fixture(scope="module", params=["eagle3", "plain"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server of two data-parallel ranks that share the experts, and one of a single rank."""
    folder = tmp_path_factory.mktemp("experts")
    gpt_oss(folder / "model")
    configs = [("DATA", "kv_both", ["--data-parallel-size", "2"]), ("ONE", "kv_both", [])]
    hooks = {"DATA": "collectives.Gathering"}
    spec = EAGLE3 | {"model": str(folder / "model" / "eagle3")} if request.param == "eagle3" else None
    with serve(folder, configs, {}, spec, folder / "model", hooks=hooks) as (data, one):
        yield {"ZERO": data.of_rank(0), "FIRST": data.of_rank(1), "ONE": one}


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[Answer]:
    return asyncio.run(alone(fleet["ONE"], PROMPTS))


@pytest.mark.parametrize(("source", "dest"), [("ZERO", "FIRST"), ("FIRST", "ONE"), ("ONE", "FIRST")])
def test_tokens_and_acceptance_are_those_of_one_vllm(
    fleet: Fleet, expected: list[Answer], source: str, dest: str
) -> None:
    pair = Pair(fleet[source], fleet[dest])
    assert [pair.prefill.identity["data_parallel_rank"], pair.decode.identity["data_parallel_rank"]] == [
        {"ZERO": 0, "FIRST": 1, "ONE": None}[name] for name in (source, dest)
    ]
    before = outcomes(pair.decode)
    check(
        asyncio.run(all_of(pair, PROMPTS, ("push", "pull"), source + dest)),
        expected,
        pair.decode.identity["num_speculative_tokens"],
    )
    wait_idle(pair.prefill, pair.decode)
    assert outcomes(pair.decode, before) == {"committed": len(PROMPTS)}


def test_aborts_leave_no_block_behind(fleet: Fleet) -> None:
    abort_at_random(Pair(fleet["ZERO"], fleet["FIRST"]))

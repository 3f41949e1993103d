"""Data-parallel ranks of a model with experts, which compute in step: each is an engine of its own. A rank without
requests runs its drafter too, and must not write into KV that it receives.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.handoff.session.keys import make_keys
from testkit.vllm.answers import Answer, same
from testkit.vllm.checkpoints import MLA, MTP, deepseek_experts, glm4_moe, gpt_oss
from testkit.vllm.killed_ranks import signal_rank
from testkit.vllm.servers import EAGLE3, Mode, Pair, Server, ask, demo_prompts, outcomes, request, serve, wait_idle
from tests.vllm.integration.test_ranks import LEASE_S, NEVER_DONE, abort_at_random, all_of, alone, check

pytestmark = pytest.mark.timeout(1800)
PROMPTS = demo_prompts([2, 3, 31, 32, 33, *range(62, 70), 95, 97, 300, 700], seed=61)
MODES: list[Mode] = ["push", "pull"]
Fleet = dict[str, Server]


@dataclass(frozen=True)
class Case:
    """A model with experts. `flags`: of all servers. `shared`: of the data-parallel one."""

    make: Callable[[Path], None]
    spec: Callable[[Path], dict[str, Any] | None]
    flags: Sequence[str] = ()
    shared: Sequence[str] = ()


# Each rank has some of the experts whole; otherwise a part of each.
WHOLE = ["--enable-expert-parallel"]
CASES = {
    "mla with mtp": Case(deepseek_experts, lambda folder: MTP, ["--attention-backend", MLA]),
    "eagle3": Case(gpt_oss, lambda folder: EAGLE3 | {"model": str(folder / "eagle3")}),
    # vLLM computes all drafts with the first one.
    "two mtp modules": Case(
        functools.partial(glm4_moe, num_modules=2),
        lambda folder: {"method": "mtp", "num_speculative_tokens": 4},
        ["--block-size", "32", "--max-num-batched-tokens", "256"],
        WHOLE,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server of two data-parallel ranks that share the experts, and one of a single rank."""
    folder, case = tmp_path_factory.mktemp("experts"), CASES[request.param]
    case.make(folder / "model")
    configs = [
        ("DATA", "kv_both", [*case.flags, "--data-parallel-size", "2", *case.shared]),
        ("ONE", "kv_both", case.flags),
    ]
    hooks, spec = {"DATA": "collectives.Gathering"}, case.spec(folder / "model")
    with serve(folder, configs, {"lease": LEASE_S}, spec, folder / "model", hooks=hooks) as (data, one):
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


def test_only_the_cure_keeps_a_dummy_step_from_writing_into_received_kv(tmp_path: Path) -> None:
    """The entries are the drafter's: they cost accepted drafts, never tokens."""
    make_keys(tmp_path / "keys", ["ONE"])
    command = [sys.executable, "-m", "testkit.vllm.dummy_step", str(tmp_path / "keys")]
    with (tmp_path / "log").open("w+") as log:
        result = subprocess.run(command, stdout=log, stderr=log, timeout=600, check=False)
    text = (tmp_path / "log").read_text()
    assert result.returncode == 0, text
    cured, uncured = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    assert cured == {"target": 0, "draft": 0}
    assert uncured["target"] == 0 < uncured["draft"], "vLLM has mended it: drop baton.vllm.draft_slots"


def test_aborts_leave_no_block_behind(fleet: Fleet) -> None:
    pairs = [("ZERO", "FIRST"), ("FIRST", "ONE"), ("ONE", "ZERO")]
    abort_at_random(*(Pair(fleet[source], fleet[dest]) for source, dest in pairs))


@pytest.mark.parametrize("fleet", ["mla with mtp"], indirect=True)
def test_a_rank_is_killed_on_either_side(fleet: Fleet, expected: list[Answer]) -> None:
    """Its server ends. Requests that it prefills are computed by the other one, set to recompute; requests that it
    decodes get errors; and the other one frees all their blocks.
    """
    one, killed = fleet["ONE"], fleet["FIRST"]

    async def leg(session: aiohttp.ClientSession, server: Server, role: str, num: int, ticket: str) -> Any:
        return await ask(session, server, request(PROMPTS[-1], num, {"role": role, "ticket": ticket}))

    async def run() -> dict[str, list[Any]]:
        legs: dict[str, list[asyncio.Task[Any]]] = {"lost": [], "recomputed": [], "prefill": []}
        async with aiohttp.ClientSession() as session:
            for kind, pair, num in (("lost", Pair(one, killed), NEVER_DONE), ("recomputed", Pair(killed, one), 20)):
                for mode in MODES * 2:
                    ticket = pair.ticket(PROMPTS[-1], mode, life_s=30)
                    first = asyncio.create_task(leg(session, pair.prefill, "prefill", 1, ticket))
                    legs[kind].append(asyncio.create_task(leg(session, pair.decode, "decode", num, ticket)))
                    legs["prefill"].append(first)
                await asyncio.sleep(0.5)
                # From now on it sends nothing: a fast machine commits every handoff within the pause.
                signal_rank(killed, 1, signal.SIGSTOP)
            signal_rank(killed, 1, signal.SIGKILL)
            return {kind: await asyncio.gather(*of, return_exceptions=True) for kind, of in legs.items()}

    before = outcomes(one)
    ends = asyncio.run(run())
    for body in ends["recomputed"]:
        assert isinstance(body, dict), body
        assert same(Answer.of(body), expected[-1]) is not False
    assert all(isinstance(end, Exception) for end in ends["lost"])
    wait_idle(one)
    assert any(name.startswith("failed_") for name in outcomes(one, before))

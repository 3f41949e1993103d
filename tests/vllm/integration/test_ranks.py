"""vLLM servers of several workers: any number of tensor ranks hands off to any other: heads with EAGLE-3, states
(Mamba-2; gated delta nets with MTP), latents (MLA) with MTP.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from testkit.vllm.answers import Answer, same, same_acceptance
from testkit.vllm.checkpoints import MLA, MTP, deepseek, mamba2, qwen3_next
from testkit.vllm.checks import alone, alone_in_turn, leave_at_random
from testkit.vllm.killed_ranks import signal_rank
from testkit.vllm.servers import (
    EAGLE3,
    MODEL,
    Mode,
    Pair,
    Server,
    ask,
    demo_prompts,
    handoff,
    outcomes,
    request,
    serve,
    wait_idle,
)
from tests.vllm.integration.test_hybrid import DELTA_NETS

pytestmark = pytest.mark.timeout(1800)
Fleet = dict[str, Server]
LEASE_S = 15.0
# Blocks of 32 tokens, chunks of 256: every residue of a block, its boundaries, several chunks.
BOTH = ["--block-size", "32", "--max-num-batched-tokens", "256"]
NEVER_DONE = 3000  # tokens: a worker is killed before they are all generated
PROMPTS = demo_prompts([2, 3, *range(33, 65), 96, 97, 256, 257, 700, 1000], seed=7)


def ranks(kind: str, count: int) -> list[str]:
    """vLLM's arguments for `count` ranks in separate processes."""
    return [f"--{kind}-parallel-size", str(count), "--distributed-executor-backend", "mp"]


@dataclass(frozen=True)
class Case:
    """A model whose tensor ranks hand over to each other. `make` writes its checkpoint; without it the demo model is
    used. `at_once`: the number of requests that are computed together; 1 for a model whose bits depend on it.
    """

    prompts: Sequence[Sequence[int]]
    flags: Sequence[str]
    spec: dict[str, Any] | None
    make: Callable[[Path], None] | None = None
    at_once: int = 16


SHORT = demo_prompts([2, 3, *range(15, 18), 31, 32, 33, *range(62, 67), 95, 97, 300, 700], seed=61)
CASES = {
    "heads with eagle3": Case(PROMPTS, BOTH, EAGLE3),
    # Caches that ranks do not share by heads of attention: states, latents.
    "mamba-2": Case(SHORT, ["--no-enable-prefix-caching", "--block-size", "128"], None, mamba2),
    "gated delta nets with mtp": Case(
        demo_prompts([66, 67, 95, 96, 97, *range(126, 131), 200, 258, 700], seed=61),
        DELTA_NETS,
        {"method": "mtp", "num_speculative_tokens": 3},
        qwen3_next,
        at_once=1,
    ),
    "mla with mtp": Case(SHORT, ["--attention-backend", MLA], MTP, deepseek),
}
OF_HEADS = pytest.mark.parametrize("case", ["heads with eagle3"], indirect=True)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def fleet(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Servers of two tensor ranks and of one; for heads a second one of two."""
    folder = tmp_path_factory.mktemp("ranks")
    if case.make is not None:
        case.make(folder / "model")
    kinds: dict[str, list[str]] = {"TWO": ranks("tensor", 2), "ONE": []}
    if case.make is None:
        kinds["OTHER"] = kinds["TWO"]
    configs = [(name, "kv_both", [*case.flags, *own]) for name, own in kinds.items()]
    model = MODEL if case.make is None else folder / "model"
    with serve(folder, configs, {"lease": LEASE_S}, case.spec, model) as servers:
        yield dict(zip(kinds, servers, strict=True))


async def all_of(
    pair: Pair, prompts: Sequence[Sequence[int]], modes: Sequence[Mode], salt: str, at_once: int = 16
) -> list[Answer]:
    """Hand over `at_once` prompts together, in the modes in turn. Checks the prefill server's first tokens."""
    found: list[Answer] = []
    async with aiohttp.ClientSession() as session:
        for start in range(0, len(prompts), at_once):
            some = enumerate(prompts[start : start + at_once], start)
            legs = [handoff(session, pair, prompt, 20, modes[at % 2], salt=salt) for at, prompt in some]
            for first, answer in await asyncio.gather(*legs):
                assert first.tokens == answer.tokens[:1] or pair.prefill.identity["truncate_prefill"]
                found.append(answer)
    return found


def check(found: Sequence[Answer], expected: Sequence[Answer], num_drafts: int) -> None:
    near_ties = other_drafts = 0
    for answer, want in zip(found, expected, strict=True):
        verdict = same(answer, want)
        assert verdict is not False, f"{answer} instead of {want}"
        other_drafts += not same_acceptance(answer, want, num_drafts)
        near_ties += verdict is None
    # Several ranks sum in another order than one worker, and so do batches of other sizes. vLLM reports no margins of
    # drafts: about one answer in a hundred has a draft at a near-tie. A draft lost by handoffs would show in most
    # answers.
    assert other_drafts <= len(found) // 10, f"{other_drafts} of {len(found)} answers have other drafts"
    accepted = sum(sum(want.accepted) for want in expected)
    print(f"{len(found)} prompts, {near_ties} part at near-ties, {other_drafts} draft otherwise, {accepted} accepted")
    assert accepted >= len(found) or not num_drafts


@pytest.fixture(scope="module")
def expected(case: Case, fleet: Fleet) -> list[Answer]:
    ask_all = alone if case.at_once > 1 else alone_in_turn
    return asyncio.run(ask_all(fleet["ONE"], case.prompts, 20))


@pytest.mark.parametrize(
    ("source", "dest", "modes"), [("TWO", "ONE", ("pull", "push")), ("ONE", "TWO", ("push", "pull"))]
)
def test_tokens_and_acceptance_are_those_of_one_vllm(
    case: Case, fleet: Fleet, expected: list[Answer], source: str, dest: str, modes: Sequence[Mode]
) -> None:
    assert len(fleet[source].identity["control_addresses"]) == (1 if source == "ONE" else 2)
    check_all_handoffs(case, Pair(fleet[source], fleet[dest]), expected, modes, source)


@OF_HEADS
def test_as_many_ranks_on_both_sides(case: Case, fleet: Fleet, expected: list[Answer]) -> None:
    check_all_handoffs(case, Pair(fleet["TWO"], fleet["OTHER"]), expected, ("push", "pull"), "equal")


def check_all_handoffs(case: Case, pair: Pair, expected: list[Answer], modes: Sequence[Mode], salt: str) -> None:
    before = outcomes(pair.decode)
    num_drafts = pair.decode.identity["num_speculative_tokens"]
    found = asyncio.run(all_of(pair, case.prompts, modes, salt, case.at_once))
    check(found, expected, num_drafts)
    wait_idle(pair.prefill, pair.decode)
    # Each handoff counts once, with any number of workers.
    assert outcomes(pair.decode, before) == {"committed": len(case.prompts)}


def hits_and_orders(pair: Pair, one: Server) -> None:
    """Prompts of which the decode server already has a part or all but the last token, with legs in any order, get the
    answers of `one` server of one rank.
    """

    async def run() -> None:
        rng = random.Random(11)
        (base,) = demo_prompts([400], seed=12)
        cases: list[tuple[list[int], float]] = [
            (base[:cut] + [rng.randrange(3, 2000) for _ in range(tail)], 0.0) for cut in (64, 399) for tail in (1, 40)
        ]
        cases += [([*base, rng.randrange(3, 2000)], late) for late in (-0.3, 0.3)] + [(base, 0.0), (base, 0.0)]
        expected = await alone(one, [prompt for prompt, _ in cases], 12)
        async with aiohttp.ClientSession() as session:
            for number, ((prompt, late), want) in enumerate(zip(cases, expected, strict=True)):
                _, answer = await handoff(session, pair, prompt, 12, ("push", "pull")[number % 2], late)  # type: ignore[arg-type]
                assert same(answer, want) is not False

    name = "vllm:prefix_cache_hits_total"
    before = pair.decode.metrics(name)[name]
    asyncio.run(run())
    assert pair.decode.metrics(name)[name] > before
    wait_idle(pair.prefill, pair.decode)


@OF_HEADS
def test_prefix_hits_and_orders(fleet: Fleet) -> None:
    hits_and_orders(Pair(fleet["TWO"], fleet["OTHER"]), fleet["ONE"])


def abort_at_random(*pairs: Pair) -> None:
    leave_at_random(pairs, 8 + 8 * len(pairs), 4, 1500, ["push", "pull"])


@OF_HEADS
@pytest.mark.parametrize(("source", "dest"), [("TWO", "OTHER"), ("ONE", "TWO")])
def test_aborts_leave_no_block_behind(fleet: Fleet, source: str, dest: str) -> None:
    abort_at_random(Pair(fleet[source], fleet[dest]))


async def under_way(pair: Pair, prompts: Sequence[Sequence[int]], server: Server, num_tokens: int = 12) -> list[Any]:
    """The outcomes of both legs of each prompt if one rank of `server` is killed during their handoffs."""

    async def leg(session: aiohttp.ClientSession, end: Server, role: str, prompt: Sequence[int], ticket: str) -> Any:
        num = 1 if role == "prefill" else num_tokens
        return await ask(session, end, request(prompt, num, {"role": role, "ticket": ticket}))

    async with aiohttp.ClientSession() as session:
        legs = []
        for number, prompt in enumerate(prompts):
            # An attempt that a decode server never announced is held until its ticket expires.
            ticket = pair.ticket(prompt, ("push", "pull")[number % 2], life_s=30)  # type: ignore[arg-type]
            legs.append(leg(session, pair.prefill, "prefill", prompt, ticket))
            legs.append(leg(session, pair.decode, "decode", prompt, ticket))
        if server is pair.prefill:
            # A fast machine commits every handoff within the pause below; a rank that is stopped commits none.
            signal_rank(server, 1, signal.SIGSTOP)
        tasks = [asyncio.create_task(each) for each in legs]
        await asyncio.sleep(0.5)
        signal_rank(server, 1, signal.SIGKILL)
        return list(await asyncio.gather(*tasks, return_exceptions=True))


@OF_HEADS
def test_one_rank_of_the_decode_server_is_killed(fleet: Fleet) -> None:
    """Its server ends, its clients get errors, and the prefill server's blocks are freed on both ranks."""
    pair = Pair(fleet["TWO"], fleet["OTHER"])
    ends = asyncio.run(under_way(pair, demo_prompts([900] * 4, seed=29), pair.decode, NEVER_DONE))
    for end in ends[1::2]:
        assert isinstance(end, Exception), end
    wait_idle(pair.prefill)


@OF_HEADS
def test_one_rank_of_the_prefill_server_is_killed(fleet: Fleet) -> None:
    """The decode server, set to recompute, gives one vLLM's answers."""
    pair = Pair(fleet["TWO"], fleet["ONE"])
    prompts = demo_prompts([900] * 4, seed=23)
    expected = asyncio.run(alone(pair.decode, prompts, 12))
    ends = asyncio.run(under_way(pair, prompts, pair.prefill))
    for end, want in zip(ends[1::2], expected, strict=True):
        assert isinstance(end, dict), end
        assert same(Answer.of(end), want) is not False
    wait_idle(pair.decode)
    assert any(name.startswith("failed_") for name in outcomes(pair.decode))

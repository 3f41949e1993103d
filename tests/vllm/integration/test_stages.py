"""vLLM servers of tensor ranks, of pipeline stages and of data-parallel ranks, without speculation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

import aiohttp
import pytest

from baton.router import RouterConfig, build_app
from testkit.servers.fake_serving import served
from testkit.vllm.answers import Answer, same
from testkit.vllm.servers import Mode, Pair, Server, ask, demo_prompts, outcomes, request, serve, wait_idle
from tests.vllm.integration.test_ranks import (
    BOTH,
    LEASE_S,
    NEVER_DONE,
    PROMPTS,
    abort_at_random,
    all_of,
    alone,
    check,
    hits_and_orders,
    ranks,
    under_way,
)

pytestmark = pytest.mark.timeout(1800)
# Stages on CPUs need something that `--enforce-eager` omits; the graph is traced, but executed eagerly.
TRACED = ["--no-enforce-eager", "--compilation-config", json.dumps({"mode": 2, "backend": "eager"})]
Fleet = dict[str, Server]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers of two tensor ranks, one of two stages, and one of two data-parallel ranks, each of one worker."""
    tensor = ranks("tensor", 2)
    kinds = {
        "TWO": tensor,
        "TWO MORE": tensor,
        "STAGES": [*TRACED, *ranks("pipeline", 2)],
        "DATA": [*TRACED, "--data-parallel-size", "2"],
    }
    configs = [(name.replace(" ", "_"), "kv_both", [*BOTH, *own]) for name, own in kinds.items()]
    with serve(tmp_path_factory.mktemp("vllm"), configs, {"lease": LEASE_S}) as servers:
        found = dict(zip(kinds, servers, strict=True))
        data = found.pop("DATA")
        yield found | {"ONE": data.of_rank(0), "OTHER": data.of_rank(1)}


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[Answer]:
    return asyncio.run(alone(fleet["ONE"], PROMPTS))


@pytest.mark.parametrize(
    ("source", "dest", "modes"),
    [
        ("TWO", "ONE", ("push", "pull")),
        ("ONE", "TWO", ("pull", "push")),
        ("TWO", "TWO MORE", ("push", "pull")),
        ("STAGES", "ONE", ("push", "pull")),
        ("OTHER", "STAGES", ("pull", "push")),
        ("STAGES", "TWO", ("push", "pull")),
        ("TWO MORE", "STAGES", ("pull", "push")),
        ("ONE", "OTHER", ("push", "pull")),
    ],
)
def test_tokens_are_those_of_one_vllm(
    fleet: Fleet, expected: list[Answer], source: str, dest: str, modes: Sequence[Mode]
) -> None:
    pair = Pair(fleet[source], fleet[dest])
    assert [pair.prefill.identity["data_parallel_rank"], pair.decode.identity["data_parallel_rank"]] == [
        {"ONE": 0, "OTHER": 1}.get(name) for name in (source, dest)
    ]
    assert [len(server.identity["control_addresses"]) for server in (pair.prefill, pair.decode)] == [
        1 if name in ("ONE", "OTHER") else 2 for name in (source, dest)
    ]
    before = outcomes(pair.decode)
    check(asyncio.run(all_of(pair, PROMPTS, modes, source + dest)), expected, 0)
    wait_idle(pair.prefill, pair.decode)
    assert outcomes(pair.decode, before) == {"committed": len(PROMPTS)}


PAIRS = [("TWO", "TWO MORE"), ("TWO", "ONE"), ("ONE", "TWO"), ("STAGES", "ONE"), ("ONE", "STAGES")]


@pytest.mark.parametrize(("source", "dest"), PAIRS)
def test_prefix_hits_and_orders(fleet: Fleet, source: str, dest: str) -> None:
    hits_and_orders(Pair(fleet[source], fleet[dest]), fleet["OTHER"])


@pytest.mark.parametrize(("source", "dest"), PAIRS)
def test_aborts_leave_no_block_behind(fleet: Fleet, source: str, dest: str) -> None:
    abort_at_random(Pair(fleet[source], fleet[dest]))


def test_a_router_gives_both_legs_to_explicit_ranks(fleet: Fleet) -> None:
    data, prompts = fleet["ONE"], demo_prompts([120] * 4, seed=53)
    config = RouterConfig(
        prefill=(f"{data.url}#dp_rank=0",),
        decode=(f"{data.url}#dp_rank=1",),
        ticket_key=data.key,
        engine="vllm",
    )

    async def run() -> None:

        expected = await alone(fleet["STAGES"], prompts, 12)
        async with aiohttp.ClientSession() as session, served(await build_app(config)) as url:
            front = Server("router", url, data.process, data.log)
            found = await asyncio.gather(*(ask(session, front, request(prompt, 12)) for prompt in prompts))
            for answer, want in zip(found, expected, strict=True):
                assert same(Answer.of(answer), want) is not False
            async with session.get(f"{url}/status") as response:
                assert (await response.json())["handoffs"]["completed"] == len(prompts)

    names, count = ("ONE", "OTHER"), "prefill_committed"
    before = [fleet[name].metrics("vllm:baton_handoffs_total").get(count, 0) for name in names]
    asyncio.run(run())
    wait_idle(fleet["ONE"], fleet["OTHER"])
    after = [fleet[name].metrics("vllm:baton_handoffs_total").get(count, 0) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [len(prompts), 0]


def test_one_stage_of_the_prefill_server_is_killed(fleet: Fleet) -> None:
    """The decode server, set to recompute, gives one vLLM's answers."""
    pair = Pair(fleet["STAGES"], fleet["ONE"])
    prompts = demo_prompts([900] * 4, seed=23)
    expected = asyncio.run(alone(fleet["OTHER"], prompts, 12))
    ends = asyncio.run(under_way(pair, prompts, pair.prefill))
    for end, want in zip(ends[1::2], expected, strict=True):
        assert isinstance(end, dict), end
        assert same(Answer.of(end), want) is not False
    wait_idle(pair.decode)
    assert any(name.startswith("failed_") for name in outcomes(pair.decode))


def test_one_rank_of_the_decode_server_is_killed(fleet: Fleet) -> None:
    """Its clients get errors, and the prefill server's blocks are freed on both ranks."""
    pair = Pair(fleet["TWO"], fleet["TWO MORE"])
    ends = asyncio.run(under_way(pair, demo_prompts([900] * 4, seed=29), pair.decode, NEVER_DONE))
    for end in ends[1::2]:
        assert isinstance(end, Exception), end
    wait_idle(pair.prefill)

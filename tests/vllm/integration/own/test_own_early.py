"""Decode legs in vLLM's own scheduler that get blocks before P has admitted them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from testkit.vllm.scheduled_engine import BLOCK, NUM_BLOCKS, ScheduledEngine, ticket
from tests.vllm.integration.test_own_scheduler import Pair, engines, random_entries

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    with engines(folder, None, None) as found:
        yield found


def num_free(engine: ScheduledEngine) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def parked(engine: ScheduledEngine) -> list[str]:
    waits = RequestStatus.WAITING_FOR_REMOTE_KVS
    return [name for name, request in engine.scheduler.requests.items() if request.status is waits]


def test_early_legs_leave_room_for_one_that_p_admits(pair: Pair, folder: Path) -> None:
    p, d = pair
    usable = NUM_BLOCKS - 1
    names = [f"early {index}" for index in range(5)]
    for index, name in enumerate(names):
        prompt = list(range(1000 * index, 1000 * index + 3 * BLOCK))
        d.add(name, prompt, 3, "decode", ticket(folder, p, d, prompt, "push"))
    d.step({})
    # Each counts 5 blocks, of which it has 3; the longest request has 16 of the pool's 31.
    assert parked(d) == names[:3], "in the first turn, although P has not heard of them"
    assert num_free(d) == usable - 9
    prompt = list(range(9000, 9500))
    signed, entries = ticket(folder, p, d, prompt, "push"), {"long": random_entries(p, 512)}
    p.add("long", prompt, 1, "prefill", signed)
    d.add("long", prompt, 3, "decode", signed)
    d.step_until(entries, p, "long", 1)
    assert d.first_tokens["long"][0] == len(prompt) - 1
    for layer, entry in entries["long"].items():
        assert d.read("long", layer, len(prompt) - 1).equal(entry[:, : len(prompt) - 1]), layer
    d.scheduler.finish_requests(["long", *names], RequestStatus.FINISHED_ABORTED)
    while num_free(d) < usable or num_free(p) < usable:
        for engine in (p, d):
            engine.step({})
    assert d.connector.scheduler.early.fits(3 * BLOCK)
    assert not d.connector.has_pending_push_work()


def test_a_leg_is_early_only_while_half_of_the_pool_is_free(pair: Pair, folder: Path) -> None:
    p, d = pair
    running = list(range(14 * BLOCK))
    d.add("running", running, 20)
    entries = {"running": random_entries(d, 512)}
    while len(d.tokens.get("running", [])) < 1:
        d.step(entries)
    prompt = list(range(1000, 1000 + 3 * BLOCK))
    d.add("late", prompt, 3, "decode", ticket(folder, p, d, prompt, "push"))
    d.step(entries)
    assert parked(d) == []
    d.scheduler.finish_requests("running", RequestStatus.FINISHED_ABORTED)
    d.step({})
    assert parked(d) == ["late"]
    d.scheduler.finish_requests("late", RequestStatus.FINISHED_ABORTED)
    while num_free(d) < NUM_BLOCKS - 1:
        for engine in (p, d):
            engine.step({})

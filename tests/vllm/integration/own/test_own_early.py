"""Decode legs in vLLM's own scheduler that get blocks before P has admitted them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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


def settle(*pair: ScheduledEngine) -> None:
    """Steps until no block is held."""
    until = time.monotonic() + 60
    while any(num_free(engine) < NUM_BLOCKS - 1 for engine in pair):
        assert time.monotonic() < until, [num_free(engine) for engine in pair]
        for engine in pair:
            engine.step({})


def test_an_early_leg_is_computed_here_if_p_ends(pair: Pair, folder: Path) -> None:
    p, d = pair
    prompt = list(range(3 * BLOCK))
    entries = {"left": random_entries(d, 512)}
    d.add("left", prompt, 3, "decode", ticket(folder, p, d, prompt, "push"))
    d.step(entries)
    assert parked(d) == ["left"]
    p.worker.shutdown()
    d.step_until(entries, d, "left", 1)
    assert d.first_tokens["left"][0] == 0
    d.scheduler.finish_requests("left", RequestStatus.FINISHED_ABORTED)
    settle(d)


def test_an_early_leg_that_leaves_between_register_and_admission_holds_nothing(pair: Pair, folder: Path) -> None:
    p, d = pair
    for index in range(6):
        prompt, name = list(range(1000 * index, 1000 * index + 10 * BLOCK)), f"gone {index}"
        signed = ticket(folder, p, d, prompt, "push" if index % 2 else "pull")
        d.add(name, prompt, 3, "decode", signed)
        d.step({})
        if index >= 3:
            p.add(name, prompt, 1, "prefill", signed)  # queued, not scheduled
        assert parked(d) == [name]
        d.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        for _ in range(index % 3):
            d.step({})
        if index >= 3:
            entries = {name: random_entries(p, 512)}
            while not p.tokens.get(name):
                for engine in pair:
                    engine.step(entries)
        settle(p, d)


@pytest.mark.parametrize("seed", range(3))
def test_legs_in_any_order_end_although_others_never_reach_p(pair: Pair, folder: Path, seed: int) -> None:
    """The pools hold a few of them. D also has requests of its own, and clients leave."""
    p, d = pair
    rng = random.Random(seed)
    prompts = {f"{index}": [1000 * index + n for n in range(rng.randrange(2, 15 * BLOCK))] for index in range(18)}
    never, own, leaving = set(list(prompts)[:3]), set(list(prompts)[3:6]), set(list(prompts)[6:8])
    entries = {name: random_entries(p, len(prompt) + 64) for name, prompt in prompts.items()}
    other = {name: {layer: -entry for layer, entry in each.items()} for name, each in entries.items()}
    handed = [name for name in prompts if name not in own]
    signed = {name: ticket(folder, p, d, prompts[name], rng.choice(["push", "pull"])) for name in handed}
    to_p, to_d = [name for name in handed if name not in never], list(prompts)
    rng.shuffle(to_p)
    rng.shuffle(to_d)
    checked: set[str] = set()
    waited, until = set(prompts) - never - leaving, time.monotonic() + 120
    while not waited <= d.tokens.keys() or any(name in d.scheduler.requests for name in waited):
        assert time.monotonic() < until, (sorted(waited - checked), parked(d), num_free(p), num_free(d))
        if to_p and rng.random() < 0.3:
            p.add(name := to_p.pop(), prompts[name], 1, "prefill", signed[name])
        if to_d and rng.random() < 0.3:
            role = ("decode", signed[name]) if (name := to_d.pop()) in signed else ()
            d.add(name, prompts[name], rng.randrange(2, 40), *role)
        if rng.random() < 0.05:
            for name in leaving & d.scheduler.requests.keys():
                d.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        p.step(entries)
        d.step(other)
        for name in d.tokens.keys() - checked:
            if d.tokens[name]:
                checked.add(name)
                check_first_step(d, name, len(prompts[name]), entries[name])
    d.scheduler.finish_requests([*d.scheduler.requests], RequestStatus.FINISHED_ABORTED)
    p.scheduler.finish_requests([*p.scheduler.requests], RequestStatus.FINISHED_ABORTED)
    settle(p, d)
    assert d.connector.scheduler.early.fits(3 * BLOCK)


def check_first_step(d: ScheduledEngine, name: str, num_tokens: int, entries: dict[str, torch.Tensor]) -> None:
    num = d.first_tokens[name][0]
    for layer, entry in entries.items():
        found = d.read(name, layer, num_tokens)
        assert found[:, :num].equal(entry[:, :num]), (name, layer)
        assert found[:, num:].equal(-entry[:, num:num_tokens]), (name, layer)

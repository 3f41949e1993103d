"""Hand-back by vLLM's own scheduler and KV-cache manager: a handoff of what D's prefix cache holds into P's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from testkit.vllm.scheduled_engine import BLOCK, DFLASH, EAGLE3, ScheduledEngine, ticket
from tests.vllm.integration.test_own_scheduler import Pair, random_entries

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module", params=[EAGLE3, DFLASH], ids=["eagle3", "dflash"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    p, d = (ScheduledEngine(folder, name, "kv_both", spec=request.param) for name in ("P", "D"))
    yield p, d
    for engine in (p, d):
        engine.worker.shutdown()


def has_blocks(engine: ScheduledEngine) -> bool:
    return bool(engine.scheduler.kv_cache_manager.usage)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("length", [3 * BLOCK + 1, 3 * BLOCK + 20, 4 * BLOCK])
def test_p_has_target_and_drafter_of_what_d_holds(pair: Pair, folder: Path, mode: str, length: int) -> None:
    p, d = pair
    assert p.identity.moves_prefixes
    turn = f"{mode}-{length}"
    prompt = [1000 * (mode == "pull") + 7 * length + token for token in range(length)]
    entries = random_entries(d, length + 16)
    d.add(f"first {turn}", prompt, 2)
    while f"first {turn}" in d.scheduler.requests:
        d.step({f"first {turn}": entries})
    # The drafter's group computes the last block again that it finds.
    held = (length - 1) // BLOCK * BLOCK
    begins, name = prompt[: held + 1], f"back {turn}"
    signed = ticket(folder, d, p, begins, mode)
    d.add(name, begins, 1, "prefill", signed, prefix=True)
    p.add(name, begins, 1, "decode", signed, prefix=True)
    other = {layer: -entry for layer, entry in entries.items()}
    d.step({name: entries})
    p.step_until({name: other}, d, name, 1)
    assert d.first_tokens[name] == (held - BLOCK, BLOCK + 1)
    assert p.first_tokens[name][0] == held
    assert p.told[name] == {"baton": {"num_tokens": held}}
    for layer, entry in entries.items():
        assert p.read(name, layer, held).equal(entry[:, :held]), layer
    while has_blocks(p) or has_blocks(d):
        d.step({})
        p.step({})
    p.add(turn, [*prompt, 5, 6], 1)
    while turn in p.scheduler.requests:
        p.step({turn: entries})
    assert p.first_tokens[turn][0] == held - BLOCK, "as one vLLM, which computes the drafter's last block again"
    # Its own blocks were written from there on; those before came from D.
    assert all(p.read(turn, layer, held).equal(entry[:, :held]) for layer, entry in entries.items())


def test_d_computes_nothing_that_it_does_not_hold(pair: Pair, folder: Path) -> None:
    """P computes it, and D's leg waits until the router closes it."""
    p, d = pair
    prompt = list(range(400, 400 + 3 * BLOCK + 1))
    signed, entries = ticket(folder, d, p, prompt, "push"), random_entries(p, len(prompt) + 16)
    d.add("lacked", prompt, 1, "prefill", signed, prefix=True)
    p.add("lacked", prompt, 1, "decode", signed, prefix=True)
    p.step_until({"lacked": entries}, d, "lacked", 1)
    assert p.told["lacked"] == {"baton": {"num_tokens": 0}}
    assert p.first_tokens["lacked"][0] == 0
    assert "lacked" not in d.first_tokens
    d.scheduler.finish_requests("lacked", RequestStatus.FINISHED_ABORTED)
    while has_blocks(p) or d.scheduler.requests:
        d.step({})
        p.step({})
    assert not has_blocks(d)


def test_an_ordinary_leg_is_computed(pair: Pair, folder: Path) -> None:
    p, d = pair
    prompt = list(range(800, 800 + 3 * BLOCK + 1))
    signed, entries = ticket(folder, d, p, prompt, "push"), random_entries(p, len(prompt) + 16)
    d.add("asked", prompt, 1, "prefill", signed)
    p.add("asked", prompt, 1, "decode", signed)
    p.step_until({"asked": entries}, d, "asked", 1)
    assert d.first_tokens["asked"][0] == 0
    assert p.first_tokens["asked"][0] == len(prompt) - 1
    assert p.told["asked"] is None

"""Sliding windows by vLLM's own scheduler and KV-cache manager: hand-back, and blocks of which only a part came."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.handoff.session.keys import make_keys
from testkit.vllm.scheduled_engine import BLOCK, EAGLE3, ScheduledEngine, ticket
from tests.vllm.integration.test_own_scheduler import Pair, random_entries

pytestmark = pytest.mark.timeout(1800)

WINDOW = 2 * BLOCK + 1 - BLOCK // 2  # needs two blocks, and begins in the middle of one
Entries = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[None, EAGLE3], ids=["alone", "with a drafter"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    ends: list[tuple[str, int | None]] = [("P", 0), ("D", None)]
    p, d = (
        ScheduledEngine(folder, name, "kv_both", window=WINDOW, spec=request.param, retention=retention)
        for name, retention in ends
    )
    yield p, d
    for engine in (p, d):
        engine.worker.shutdown()


def run(engine: ScheduledEngine, name: str, prompt: list[int], entries: Entries, num: int = 1) -> None:
    engine.add(name, prompt, num)
    while name in engine.scheduler.requests:
        engine.step({name: entries})


def hand_back(
    pair: Pair, folder: Path, name: str, chat: list[int], entries: Entries, held: int, extra: int, mode: str
) -> None:
    """Of what the source has, the destination would write the negative."""
    p, d = pair
    begins = chat[: held + 1]
    signed = ticket(folder, d, p, begins, mode)
    d.add(name, begins, 1, "prefill", signed, prefix=True)
    longer = chat[: held + extra + 1]
    p.add(name, longer, 1, "decode", signed, prefix=True, num_tokens=held, whole_blocks=True)
    d.step({name: entries})
    drops = d.identity.prefix_extra
    assert d.first_tokens[name] == (held - drops, drops + 1), "the source computes what one vLLM would"
    other = {layer: torch.cat([-entry[:, :held], entry[:, held:]], dim=1) for layer, entry in entries.items()}
    p.step_until({name: other}, d, name, 1)
    assert p.first_tokens[name][0] == held
    assert p.told[name] == {"baton": {"num_tokens": held}}


def sees(engine: ScheduledEngine, name: str, entries: Entries, num_tokens: int) -> None:
    """What the next query of each layer reads is there."""
    for number, (layer, entry) in enumerate(entries.items()):
        seen = slice(num_tokens - WINDOW + 1 if number == 1 else 0, num_tokens)
        assert engine.read(name, layer, num_tokens)[:, seen].equal(entry[:, seen]), layer


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("longer", [True, False])
def test_a_window_that_was_handed_back_is_found(pair: Pair, folder: Path, mode: str, longer: bool) -> None:
    """vLLM drops the last block that it finds if there is a drafter of hidden states, and looks for a window before it,
    of which one block did not come: unless a block more was computed, it finds nothing at all."""
    p, d = pair
    extra = p.identity.prefix_extra
    assert (p.identity.moves_prefixes, p.identity.prefix_multiple) == (True, BLOCK)
    assert extra == (BLOCK if len(p.layers) == 3 else 0)
    if not longer and not extra:
        pytest.skip("there is no block more")
    turn, held = f"{mode}-{longer}", 5 * BLOCK
    chat = [500 * (mode == "pull") + 1000 * longer + token for token in range(7 * BLOCK)]
    entries = random_entries(d, len(chat) + 16)
    run(d, f"first {turn}", chat[: held + 20], entries)
    hand_back(pair, folder, f"back {turn}", chat, entries, held, extra if longer else 0, mode)
    p.add(turn, chat, 1)
    p.step({turn: entries})
    assert p.first_tokens[turn][0] == (held if longer else 0)
    if longer:
        sees(p, turn, entries, held)
    while any(engine.scheduler.requests for engine in pair):
        p.step({turn: entries})
        d.step({})


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_conversations_window_goes_to_and_fro(pair: Pair, folder: Path, mode: str) -> None:
    """D has got the window from P, in part, and answered: its own whole blocks are handed back."""
    p, d = pair
    length, answer, held = 2 * BLOCK + 5, 2 * BLOCK + 6, 4 * BLOCK
    prompt = [3000 + 500 * (mode == "pull") + token for token in range(length)]
    chat = prompt + [5] * answer + prompt[:40]
    entries = random_entries(d, len(chat) + 16)
    name = f"chat {mode}"
    signed = ticket(folder, p, d, prompt, mode)
    p.add(name, prompt, 1, "prefill", signed)
    d.add(name, prompt, answer, "decode", signed)
    for _ in range(2):
        p.step({name: entries})
    d.step_until({name: entries}, p, name, answer)
    hand_back(pair, folder, f"{name} back", chat, entries, held, p.identity.prefix_extra, mode)
    p.add(f"{name} again", chat, 1)
    p.step({f"{name} again": entries})
    assert p.first_tokens[f"{name} again"][0] == held
    sees(p, f"{name} again", entries, held)
    while any(engine.scheduler.requests for engine in pair):
        p.step({f"{name} again": entries})
        d.step({})


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_window_that_came_whole_is_found_in_the_next_turn(pair: Pair, folder: Path, mode: str, whole: bool) -> None:
    p, d = pair
    prompt = [5000 + 500 * (mode == "pull") + 1000 * whole + token for token in range(3 * BLOCK + 1)]
    answer = BLOCK + 6 if d.identity.prefix_extra else 1  # vLLM needs a block more
    chat = prompt + [5] * answer + prompt[:20]
    entries = random_entries(d, len(chat) + 16)
    name = f"whole {mode} {whole}"
    signed = ticket(folder, p, d, prompt, mode)
    p.add(name, prompt, 1, "prefill", signed)
    d.add(name, prompt, answer, "decode", signed, whole_blocks=whole)
    for _ in range(2):
        p.step({name: entries})
    d.step_until({name: entries}, p, name, answer)
    d.add(f"{name} again", chat, 1)
    d.step({f"{name} again": entries})
    assert d.first_tokens[f"{name} again"][0] == (3 * BLOCK if whole else 0)
    if whole:
        sees(d, f"{name} again", entries, 3 * BLOCK)
    while any(engine.scheduler.requests for engine in pair):
        d.step({f"{name} again": entries})
        p.step({})


def test_a_block_that_came_in_part_is_no_prefix(tmp_path: Path) -> None:
    """A third prompt finds the block before it, which another prompt has computed, and the part that the next query of
    the received one has not seen would be in its window."""
    make_keys(tmp_path / "keys", ["P", "D"])
    p, d = (ScheduledEngine(tmp_path, name, "kv_both", window=WINDOW, spec=None) for name in ("P", "D"))
    prompt = list(range(100, 100 + 3 * BLOCK + 1))
    entries = random_entries(d, len(prompt) + 16)
    try:
        run(d, "begins", prompt[: BLOCK + 1], entries)
        signed = ticket(tmp_path, p, d, prompt, "push")
        p.add("whole", prompt, 1, "prefill", signed)
        d.add("whole", prompt, 1, "decode", signed)
        p.step({"whole": entries})
        d.step_until({"whole": entries}, p, "whole", 1)
        assert d.first_tokens["whole"][0] == 3 * BLOCK
        other = [*prompt[: 2 * BLOCK], 7, 8, 9]
        d.add("other", other, 1)
        d.step({"other": entries})
        hit = d.first_tokens["other"][0]
        seen = slice(max(0, hit - WINDOW + 1), hit)
        window = d.layers[1]
        assert d.read("other", window, hit)[:, seen].equal(entries[window][:, seen]), hit
    finally:
        for engine in (p, d):
            engine.worker.shutdown()

"""Latents, a window and states under faults: groups that no seed draws together, declared by the test alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from random import Random

import pytest

from baton.kv.block_tables import BlockTables
from baton.kv.cache import KVCache
from baton.kv.interval import Rules
from baton.kv.spec import Owner
from simulation import run_seed, scenario
from simulation.settings import FAULTS, GroupModel, Settings, draw

# A drafter without KV: its drafts go into no group.
TOY = (
    GroupModel("latent", "target", "mla", None, 0, 1),
    GroupModel("window", "target", "sliding_window", 5, 0, 2),
    GroupModel("state", "target", "state", None, 0, 3),
)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(random: Random, allowed: Collection[str] = FAULTS) -> Settings:
        return replace(draw(random, allowed), groups=TOY, num_drafts=3)

    monkeypatch.setattr(scenario, "draw", toy)


def test_without_faults_every_answer_is_exact() -> None:
    for seed in range(8):
        result = run_seed(seed, faults=())
        assert result.violation is None, result.violation
        assert set(result.outcomes) == {"exact"}


def test_under_faults_nothing_wrong_is_computed_or_sent() -> None:
    outcomes: Counter[str] = Counter()
    rungs: Counter[str] = Counter()
    for seed in range(60):
        result = run_seed(seed)
        assert result.violation is None, (seed, result.violation)
        outcomes += result.outcomes
        rungs += result.rungs
    assert outcomes["exact"] > sum(outcomes.values()) / 3
    assert rungs["recompute"] > 0


def free_a_page_of_the_window_too_early(patch: pytest.MonkeyPatch) -> None:
    original = Rules.first_needed
    patch.setattr(
        Rules, "first_needed", lambda self, computed: original(self, computed) + (self.window is not None) * 6
    )


def show_a_scratch_slot(patch: pytest.MonkeyPatch) -> None:
    original = KVCache.offered

    def offered(self: KVCache, tables: BlockTables, num_tokens: int) -> dict[str, list[int]]:
        return {**original(self, tables, num_tokens), **{name: slots[:1] for name, slots in tables.scratch.items()}}

    patch.setattr(KVCache, "offered", offered)


def go_on_from_the_wrong_state(patch: pytest.MonkeyPatch) -> None:
    original = KVCache.accept

    def accept(
        self: KVCache, tables: BlockTables, num_accepted: int, num_computed: int, owner: Owner = "target"
    ) -> None:
        original(self, tables, 0, num_computed, owner)

    patch.setattr(KVCache, "accept", accept)


def say_final_before_the_end(patch: pytest.MonkeyPatch) -> None:
    original = Rules.final

    def final(self: Rules, n: int, computed: int, *, seeded: bool = False) -> int:
        return int(computed > 0) if self.kind == "state" else original(self, n, computed, seeded=seeded)

    patch.setattr(Rules, "final", final)


@pytest.mark.parametrize(
    "breaks",
    [
        free_a_page_of_the_window_too_early,
        show_a_scratch_slot,
        go_on_from_the_wrong_state,
        say_final_before_the_end,
    ],
)
def test_a_broken_engine_is_found(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    found = next(str(violation) for seed in range(40) if (violation := run_seed(seed).violation))
    assert "TypeError" not in found  # such an error would come from a replacement with outdated arguments

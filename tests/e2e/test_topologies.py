"""A slice of `make topologies`: engines with other ranks give one engine's answers, and a wrong share is detected."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.handoff.plan import planner, topology
from benchmarks.parity.cases import HANDED_BACK, cases
from benchmarks.topologies.__main__ import Engines, run, trial_of

pytestmark = pytest.mark.usefixtures("one_thread", "forks")
# Handed back is a prompt of several pages.
BATCH = [replace(case, length=63) if case.condition == HANDED_BACK else case for case in cases(5, 1)]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("GQA target with 2 KV heads, EAGLE-3", ("TP 2 to TP 1", "2 stages to 2 of TP 2", "attention-DP 2 to TP 1")),
        ("MLA target, MHA EAGLE-3", ("TP 4 to TP 4, drafters on 1 rank",)),
        ("MLA target, MTP", ("TP 1 to TP 2",)),  # ranks share a vocabulary that the drafter reads too
        ("Mamba-2 hybrid", ("TP 2 to TP 1",)),
    ],
)
def test_tokens_and_acceptance_are_those_of_one_engine(name: str, shapes: tuple[str, ...], tmp_path: Path) -> None:
    model = trial_of(name, tmp_path)
    alone, handed_back = model.alone(BATCH), 0
    with ExitStack() as kept:
        engines = Engines(model, kept)
        for shape in shapes:
            cell = run(engines, shape, "16/7", alone)
            assert not cell.failures
            assert cell.num_identical == cell.num_cases == len(BATCH)
            assert cell.num_bytes == cell.wanted_bytes > 0
            handed_back += cell.num_handed_back
    assert handed_back > 0 or "hybrid" in name, "prompts are too short for the checkpoints of states"


def test_a_kept_engine_has_no_prefix_of_an_earlier_cell(tmp_path: Path) -> None:
    """P as one process, and as two stages, hands over to the same D, with as many bytes."""
    model = trial_of("Gemma 4 without shared keys, assistant", tmp_path, dtype="bfloat16")
    alone = model.alone(BATCH)
    assert any(sum(stream.accepted) for stream in alone.values())
    with ExitStack() as kept:
        engines = Engines(model, kept)
        cells = [run(engines, shape, "16/7", alone) for shape in ("TP 1 to TP 2", "2 stages to TP 2")]
    assert [cell.failures for cell in cells] == [[], []]
    assert cells[0].num_bytes == cells[1].num_bytes


def test_a_wrong_share_of_heads_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assign(sources: Any, dest: Any) -> Any:
        shares = topology.assign(sources, dest)
        return {rank: tuple(replace(box, source_head=0) for box in boxes) for rank, boxes in shares.items()}

    name = "GQA target with 2 KV heads, EAGLE-3"
    model = trial_of(name, tmp_path)
    alone = model.alone(BATCH)
    monkeypatch.setattr(planner, "assign", assign)
    with ExitStack() as kept:
        cell = run(Engines(model, kept), "TP 1 to TP 2", "16/16", alone)
    assert cell.num_identical < cell.num_cases

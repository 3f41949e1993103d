"""A slice of what `make simulate` plays, and the simulator's own promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.testing.simulator import run_seed
from baton.testing.simulator.parallel import run_seeds
from baton.testing.simulator.settings import FAULTS, RATES, STRIKES


@pytest.mark.slow
def test_five_hundred_seeds() -> None:
    total = run_seeds(range(500))
    assert not total.failures
    assert total.seeds == 500
    assert {kind for kind in FAULTS if total.injected[kind]} == set(FAULTS)
    assert total.outcomes["exact"] > sum(total.outcomes.values()) / 3
    assert min(total.rungs[rung] for rung in ("source", "recompute", "resume")) > 0


def test_without_faults_every_answer_is_exact() -> None:
    total = run_seeds(range(30), faults=())
    assert not total.failures
    assert set(total.outcomes) == {"exact"}
    assert not total.injected


@pytest.mark.parametrize("kind", sorted({*RATES, *STRIKES}))
def test_each_fault_alone(kind: str) -> None:
    total = run_seeds(range(12), faults=(kind,))
    assert not total.failures
    assert total.injected[kind] > 0
    assert set(total.injected) == {kind}


def test_a_seed_replays() -> None:
    """The same schedule in this process and, with other string hashes, in another."""
    first = run_seed(7, tracing=True).trace
    assert first == run_seed(7, tracing=True).trace
    run = subprocess.run(
        [sys.executable, "-m", "baton.testing.simulator", "--seed", "7", "--trace"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": "12345"},
    )
    assert [line for line in first[1:] if line not in run.stdout] == []


def test_an_unknown_fault_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "baton.testing.simulator", "--faults", "gremlins"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert "gremlins" in run.stderr

"""A handoff sends as many bytes as bytes_by_hand.md computes, for every target and drafter of the matrix."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.parity.cases import MODES, Case
from benchmarks.parity.models import DRAFTERS, TARGETS
from benchmarks.parity.trial import Trial, compare
from testkit.engines import Mode

pytestmark = pytest.mark.usefixtures("one_thread")
DOCUMENT = Path(__file__).with_name("bytes_by_hand.md")
NUM_TOKENS = 40


def by_hand() -> dict[str, int]:
    """Bytes of each target and drafter: its lines multiplied out and added."""
    found: dict[str, int] = defaultdict(int)
    for line in DOCUMENT.read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if len(columns) == 4 and re.fullmatch(r"[\d,]+", columns[3]):
            name, _, arithmetic, stated = columns
            factors = [int(re.match(r"\d+", factor.strip())[0]) for factor in arithmetic.split(" x ")]  # type: ignore[index]
            assert math.prod(factors) == int(stated.replace(",", "")), line
            found[name] += math.prod(factors)
    return dict(found)


BY_HAND = by_hand()
OF_PAIRS = {name for name in BY_HAND if "/" in name}


def test_every_target_and_drafter_has_its_lines() -> None:
    assert BY_HAND.keys() - OF_PAIRS == TARGETS.keys() | DRAFTERS.keys()


# Each target without a drafter, and each drafter once.
PAIRS = [(target, "none") for target in TARGETS]
PAIRS += [
    (next(target for target in TARGETS if entry.needs(target) is None), drafter)
    for drafter, entry in DRAFTERS.items()
    if drafter != "none"
]
PAIRS += [(target, drafter) for target, _, drafter in (name.partition("/") for name in sorted(OF_PAIRS))]


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_bytes_sent_are_those_computed_by_hand(target: str, drafter: str, tmp_path: Path) -> None:
    expected = BY_HAND[target] + BY_HAND.get(f"{target}/{drafter}", BY_HAND[drafter])
    trial = Trial(target, drafter, tmp_path)
    cases: dict[Mode, Case] = {mode: Case("whole", mode, NUM_TOKENS, i, seed=3) for i, mode in enumerate(MODES)}
    alone = trial.alone(list(cases.values()), also_without=False)
    with trial.pair("per group") as two:
        for case in cases.values():
            cell = compare(two, {case: alone[case]})
            assert not cell.failures
            assert (cell.wanted_bytes, cell.num_bytes) == (expected, expected)


def test_a_prefix_that_d_holds_is_not_sent(tmp_path: Path) -> None:
    """Except the drafter's last entry, which depends on the first token: one head, 8 wide, K and V."""
    trial = Trial("llama", "eagle3, d2t", tmp_path)
    case = Case("whole", "push", NUM_TOKENS, 0, seed=3)
    again = Case("whole", "pull", NUM_TOKENS, 0, seed=3)
    alone = trial.alone([case])
    with trial.pair("16/7") as two:
        compare(two, alone)
        cell = compare(two, {again: alone[case]})
    assert not cell.failures
    assert cell.num_bytes == 1 * 1 * 2 * 1 * 8 * 4

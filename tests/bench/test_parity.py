"""A slice of the parity matrix, and its results for broken engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.kv.cache import KVCache
from baton.kv.interval import Interval, Rules
from benchmarks.parity.__main__ import main
from benchmarks.parity.cases import ALL_SIZES, CONDITIONS, HANDED_BACK, LENGTHS, MODES, Case, cases
from benchmarks.parity.models import DRAFTERS, TARGETS, THREE_MODULES
from benchmarks.parity.trial import Trial, compare, run
from simulation.topologies import Shape

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_lengths_end_at_every_place_of_every_page() -> None:
    for page_size in (3, 5, 7, 8, 12, 16, 24):
        for mode in MODES:
            for condition in ("whole", "chunked"):
                found = {c.length % page_size for c in cases(0, None) if (c.condition, c.mode) == (condition, mode)}
                assert found == set(range(page_size))
    assert {1, 2, 48, 112} <= set(LENGTHS)
    together = {c.length for c in cases(0, None) if c.condition not in ("whole", "chunked")}
    assert together == set(LENGTHS)


def every_residue(seed: int) -> list[Case]:
    """A request of each mode and condition. Together they end at every position of pages of at most 16 tokens."""
    drawn = cases(seed, 1)
    turns = [(seed + i) % len(drawn) for i in range(len(drawn))]
    return [replace(case, length=1 + turn + 16 * (turn % 3)) for case, turn in zip(drawn, turns, strict=True)]


@pytest.mark.parametrize("page_size", [3, 5, 7, 8, 12, 16])
def test_a_slice_ends_at_every_place_of_every_page(page_size: int) -> None:
    assert {case.length % page_size for case in every_residue(4)} == set(range(page_size))


# Each target once, with another drafter each time.
PAIRS = [(target, list(DRAFTERS)[i % len(DRAFTERS)]) for i, target in enumerate(TARGETS)]
PAIRS += [("deepseek_v32", "mtp"), (THREE_MODULES, "mtp, three modules")]
RANKS = (Shape(stages=2), Shape(2))


@pytest.mark.parametrize(("target", "drafter"), [pair for pair in PAIRS if DRAFTERS[pair[1]].needs(pair[0]) is None])
def test_a_slice_is_identical(target: str, drafter: str, tmp_path: Path) -> None:
    """Between engines of one rank, and of every second pair, with other page sizes, between engines of several."""
    sizes = ALL_SIZES[len(target) % 2 :: 2][: 1 + PAIRS.index((target, drafter)) % 2]
    dtype = "bfloat16" if len(drafter) % 2 else "auto"
    outcome = run(target, drafter, tmp_path, every_residue(len(target)), sizes, dtype, dict.fromkeys(sizes[1:], RANKS))
    assert outcome.conditions.keys() == CONDITIONS.keys()
    for cell in outcome.cells.values():
        assert cell.failures == []
        assert cell.num_identical == cell.num_cases == len(CONDITIONS)
        assert cell.num_bytes > 0
    if drafter != "none":
        assert outcome.rounds > outcome.accepted[0] > 0


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("deepseek_v3", "mtp"),
        (THREE_MODULES, "mtp, three modules"),
        ("mistral, window", "eagle"),
        ("granitemoehybrid", "draft_model, states"),
        ("qwen3_next", "mtp"),
        ("kimi_linear", "eagle3"),
        ("deepseek_v32", "eagle"),
        ("gpt_oss", "dflash"),
    ],
)
def test_every_kind_of_cache_and_drafter_is_handed_back(target: str, drafter: str, tmp_path: Path) -> None:
    """Heads, latents, windows and states of targets and drafters go from D to P; a handoff to D follows."""
    batch = [case for case in cases(2, None) if case.condition == HANDED_BACK and case.length > 17]
    trial = Trial(target, drafter, tmp_path, 2)
    alone = trial.alone(batch)
    with trial.pair("16/16") as two:
        cells = [compare(two, {case: alone[case] for case in batch if case.mode == mode}) for mode in MODES]
    assert [(cell.failures, cell.num_identical) for cell in cells] == [([], cell.num_cases) for cell in cells]
    assert min(cell.num_handed_back for cell in cells) >= 16


def test_the_command_prints_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "llama/eagle3, d2t", "--cases", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in printed if line.startswith("| llama")]
    assert all(len(row) == 5 + len(MODES) * len(ALL_SIZES) for row in rows)
    num = len(CONDITIONS)
    assert all(column == f"{num}/{num}" for row in rows if "-" not in row for column in row[2:-3])
    total = len(MODES) * len(ALL_SIZES) * num * sum("-" not in row for row in rows)
    assert printed[-1] == f"identical {total}/{total}"


def send_the_last_entry_of_the_drafter_not_at_all(patch: pytest.MonkeyPatch) -> None:
    original = Rules.wanted

    def wanted(self: Rules, n: int, hit: int) -> Interval:
        found = original(self, n, hit)
        return Interval(min(found.start, n - 1), n - 1) if self.module else found

    patch.setattr(Rules, "wanted", wanted)


def take_a_page_of_a_window_too_many(patch: pytest.MonkeyPatch) -> None:
    original = KVCache._free_before
    patch.setattr(KVCache, "_free_before", lambda self, tables, group, token: original(self, tables, group, token + 8))


def hit_in_part_without_a_copy(patch: pytest.MonkeyPatch) -> None:
    original = KVCache.__init__

    def init(self: KVCache, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        self._copy_page = lambda *_: None

    patch.setattr(KVCache, "__init__", init)


@pytest.mark.parametrize(
    ("breaks", "target", "condition"),
    [
        (send_the_last_entry_of_the_drafter_not_at_all, "llama", "whole"),
        (take_a_page_of_a_window_too_many, "qwen3, full and window", "whole"),
        (hit_in_part_without_a_copy, "llama", "hit on P"),
        (hit_in_part_without_a_copy, "llama", "hit on D"),
    ],
)
def test_a_broken_engine_is_seen(
    breaks: object, target: str, condition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(breaks)
    batch = [case for case in cases(1, 12) if case.condition == condition]
    assert not any(cell.failures for cell in run(target, "eagle", tmp_path / "sound", batch, ["8/24"]).cells.values())
    breaks(monkeypatch)
    broken = run(target, "eagle", tmp_path / "broken", batch, ["8/24"])
    assert any(cell.failures for cell in broken.cells.values())

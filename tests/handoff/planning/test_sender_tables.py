"""The tables of docs/reference/senders.md match the code, and no unnecessary byte is sent."""

from __future__ import annotations

from pathlib import Path

from benchmarks.topologies import senders
from benchmarks.topologies.planning import BY_HEAD, MODELS, measure

DOCUMENT = (Path(__file__).parents[3] / "docs/reference/senders.md").read_text()


def test_the_tables_are_those_of_the_code() -> None:
    stated = DOCUMENT[DOCUMENT.index(senders.BEGIN) : DOCUMENT.index(senders.END)]
    assert stated + senders.END == senders.text(), "run python -m benchmarks.topologies.senders"
    numbers = [line.split("|")[-3:-1] for line in stated.splitlines() if line.startswith("|") and line[-3].isdigit()]
    assert len(numbers) == 4 * 16 + 15
    assert [sent for sent, _ in numbers] == [least for _, least in numbers]


def test_a_rank_plans_no_more_than_its_share_however_many_ranks_there_are() -> None:
    groups, page_size, layout = MODELS["MLA, MHA drafter, pages of 64"]
    assert layout is BY_HEAD
    small, large = (measure("", groups, page_size, layout, p, d) for p, d in ((2, 1), (16, 8)))
    assert (small.plans, small.runs) == (large.plans, large.runs) == (2, 61 * 128 + 2 * 128)

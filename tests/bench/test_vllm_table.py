"""The table of `python -m benchmarks.vllm.handoffs`: ratios within rounds, with failed rounds omitted and counted."""

from __future__ import annotations

import pytest

from benchmarks.vllm.handoffs import Row, table
from benchmarks.vllm.legs import Answer


def answer(first: float, gap: float, num: int) -> Answer:
    """`num` tokens: the first after `first` seconds, then one every `gap`."""
    return Answer(list(range(num)), [first + gap * index for index in range(num)])


def test_a_row_takes_times_in_milliseconds() -> None:
    row = Row()
    row.add(answer(0.030, 0.002, 1000))
    assert row.ttft == [30.0]
    assert row.second == pytest.approx([32.0])
    assert row.tpot == pytest.approx([2.0])


def test_ratios_are_within_rounds_and_failures_are_told() -> None:
    one, other = Row(), Row()
    for slow in (1, 10, 1):
        one.add(answer(0.010 * slow, 0.002, 10))
    other.add(answer(0.020, 0.002, 10))
    other.add(answer(0.200, 0.002, 10))
    other.add(None)
    lines = table({"one vLLM": one, "two": other}, "one vLLM")
    cells = [cell.strip() for cell in lines[-1].split("|")]
    assert cells[1:4] == ["two", "110.00", "2.00 (2.00-2.00)"]
    assert cells[-2] == "1 failed"

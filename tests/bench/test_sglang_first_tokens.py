"""The table of `python -m benchmarks.sglang.first_tokens`."""

from __future__ import annotations

import pytest

from benchmarks.sglang.first_tokens import ONE, handoffs_ms, table
from benchmarks.sglang.handoffs import Timed


def said(after_ms: float) -> Timed:
    """A first token so long after the end of the prefill."""
    return Timed([7], [0.5], 1000.0, 1000.0 + after_ms / 1e3)


def test_a_handoff_is_what_a_pair_needs_besides_one_server() -> None:
    rounds = [{ONE: said(2), "nixl": said(9)}, {ONE: said(90), "nixl": said(10)}, {ONE: said(3), "nixl": said(30)}]
    assert handoffs_ms(rounds, "nixl") == pytest.approx([6, 7, 27], abs=1e-3)
    one, nixl = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table(rounds, ["nixl"])[2:])
    assert one == [ONE, "3", "3.0", "-", "-", "-"]
    assert nixl == ["nixl", "3", "10.0", "7.0", "6.0 to 27.0", "6.0 to 27.0"]


def test_a_pair_that_does_not_answer_has_no_handoff() -> None:
    assert table([{ONE: said(2)}], ["nixl"])[-1] == "| nixl | 0 | - | - | - | - |"

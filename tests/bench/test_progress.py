"""Benchmarks show how far they are on a terminal, and are quiet elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from baton.bench import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_a_bar_is_for_terminals(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress_bar.with_progress([7, 8, 9], "pair", delay_s=0.0)) == [7, 8, 9]
    told = stream.getvalue()
    assert ("0/3" in told and "Benchmark" in told) if stream.isatty() else told == ""

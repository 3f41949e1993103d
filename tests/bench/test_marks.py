"""Marks of vLLM's processes (`benchmarks.vllm.marks`)."""

from __future__ import annotations

import os
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.vllm import marks


class Scheduler:
    def schedule(self, num_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(total_num_scheduled_tokens=num_tokens)


HOP = marks.Hop(__name__, "Scheduler.schedule", before=marks.always("asked"), after=marks.if_tokens("scheduled"))


def test_calls_that_matter_are_marked_and_answered_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = marks.announce(tmp_path)
    monkeypatch.setenv(marks.MARKS_DIR, variables[marks.MARKS_DIR])
    monkeypatch.syspath_prepend(variables["PYTHONPATH"])
    (found,) = entry_points(group="vllm.general_plugins", name="baton_marks")
    found.load()([HOP])
    start = time.monotonic()
    assert [Scheduler().schedule(number).total_num_scheduled_tokens for number in (0, 3)] == [0, 3]
    passed = marks.read_marks(Path(variables[marks.MARKS_DIR]), os.getpid(), start, time.monotonic())
    assert [mark.label for mark in passed] == ["asked", "asked", "scheduled"]
    assert [mark.at for mark in passed] == sorted(mark.at for mark in passed)
    assert marks.read_marks(Path(variables[marks.MARKS_DIR]), os.getpid(), 0.0, start) == []
    assert marks.read_marks(tmp_path, 1, 0.0, start) == []

"""The way of a handoff through the code stays short."""

from __future__ import annotations

from tools.call_paths import definitions, ways


def test_a_handoff_takes_few_calls() -> None:
    seen = ways()
    assert len(seen) == 4
    for end in ("FINAL", "COMMIT"):
        calls = [call for name, found in seen.items() if name.startswith(end) for call in found]
        assert len(calls) < 12, calls
        assert len({cls for cls, _ in calls if cls}) <= 6, calls


def test_the_engines_calls_are_defined_once() -> None:
    names = [where.rpartition(".")[2] for where in definitions()]
    assert len(names) == len(set(names)) == 8

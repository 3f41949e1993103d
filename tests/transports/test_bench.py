"""The benchmark measures what it says; its figures are not judged here."""

from __future__ import annotations

import pytest

from baton.bench.transport import measure_copies, measure_planning, runnable_transports
from baton.errors import ConfigError


def test_a_small_benchmark_reports_all_figures() -> None:
    copies = measure_copies("shm", [1 << 16, 1 << 18], [4 << 10, 128 << 10], rounds=3)
    cases = [(f.transport, f.nbytes, f.run_bytes) for f in copies]
    assert cases == [
        ("shm", 65536, 4096),
        ("shm", 65536, 65536),
        ("memcpy", 65536, 65536),
        ("shm", 262144, 4096),
        ("shm", 262144, 131072),
        ("memcpy", 262144, 262144),
    ]
    assert all(0 < f.gb_per_s_low <= f.gb_per_s <= f.gb_per_s_high and f.rounds == 3 for f in copies)
    assert [f.over_memcpy for f in copies if f.transport == "memcpy"] == [1.0, 1.0]
    planning = measure_planning(runs=640, rounds=1)
    # Shuffled pages are sometimes neighbours on both sides, and then they are one run.
    assert 600 < min(planning["plan_pages_runs"], planning["plan_layers_runs"]) <= 640


def test_unusable_sizes_and_transports_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="run_size"):
        measure_copies("shm", [10_000], [4096])
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    found, why = runnable_transports(["shm", "mooncake"])
    assert found == ["shm"]
    assert "mooncake" in why["mooncake"]

"""The benchmark measures what it says; its figures are not judged here."""

from __future__ import annotations

from baton.bench.transport import measure_copies, measure_planning


def test_small_rounds() -> None:
    copies = measure_copies(nbytes=1 << 18, rounds=1)
    assert {"shm_32k_over_memcpy", "shm_4k_over_memcpy"} <= set(copies)
    assert min(copies.values()) > 0
    planning = measure_planning(runs=640, rounds=1)
    # Shuffled pages are neighbours on both sides now and then, and then they are one run.
    assert 600 < min(planning["plan_pages_runs"], planning["plan_layers_runs"]) <= 640

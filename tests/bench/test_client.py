"""Figures of a streamed completion."""

from __future__ import annotations

import math

from baton.bench.timed_stream import Streamed


def test_the_second_gap_is_counted_in_gaps_between_events() -> None:
    """Tokens of one event share a time."""
    streamed = Streamed(times_s=[1.0, 1.5, 1.5, 1.75, 2.0, 2.0, 3.0])
    assert streamed.second_gap == 2.0
    assert math.isnan(Streamed(times_s=[1.0, 1.5, 1.5]).second_gap)

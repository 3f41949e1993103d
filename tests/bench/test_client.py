"""Figures of a streamed completion."""

from __future__ import annotations

import math

from baton.bench.serve import compare
from baton.bench.timed_stream import Streamed


def test_the_second_gap_is_counted_in_gaps_between_events() -> None:
    """Tokens of one event share a time."""
    streamed = Streamed(times_s=[1.0, 1.5, 1.5, 1.75, 2.0, 2.0, 3.0])
    assert streamed.second_gap == 1.0
    assert math.isnan(Streamed(times_s=[1.0, 1.5, 1.5]).second_gap)


def test_events_that_a_late_client_reads_together_do_not_shorten_the_other_gaps() -> None:
    late = Streamed(times_s=[1.0, 2.0, 5.0, 5.0001, 5.0002, 6.0])
    assert late.second_gap == 1.0


def test_two_deployments_are_compared_with_the_spread_of_the_second_gap() -> None:
    def answer(ttft_s: float, second_s: float) -> Streamed:
        return Streamed(token_ids=[1, 2, 3], times_s=[ttft_s, ttft_s + second_s, ttft_s + second_s + 1.0])

    reference = [answer(1.0, 0.75), answer(1.0, 1.0), answer(1.0, 1.5)]
    figures = compare(reference, [answer(2.0, 3.0), answer(2.0, 1.0), answer(4.0, 1.25)])
    assert (figures.num_pairs, figures.ttft_ratio) == (3, 2.0)
    assert (figures.reference_second_gap, figures.reference_second_gap_range) == (1.0, (0.75, 1.5))
    assert (figures.second_gap, figures.second_gap_range) == (1.25, (1.0, 3.0))

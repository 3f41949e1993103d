"""The router's measure of how long moving and computing take."""

from __future__ import annotations

import pytest

from baton.observe.pace import TokenPace


def measured(*pairs: tuple[float, int]) -> TokenPace:
    """Of (seconds, tokens), after a first measurement that includes connecting."""
    pace = TokenPace()
    for seconds, num_tokens in ((99.0, 1), *pairs):
        pace.measure(seconds, num_tokens)
    return pace


def test_the_first_measurement_includes_connecting_and_is_ignored() -> None:
    assert measured().predict(100) is None
    assert measured().per_token is None
    assert TokenPace().predict(1) is None


def test_a_part_does_not_depend_on_the_tokens() -> None:
    """As a hand-back: some messages, and bytes."""
    pace = measured(*((0.010 + 0.0001 * num, num) for num in (48, 200, 64, 1000, 300)))
    assert pace.predict(16) == pytest.approx(0.0116)
    assert pace.predict(2000) == pytest.approx(0.21)
    assert pace.per_token == pytest.approx(0.0001)


def test_of_one_size_it_is_in_proportion() -> None:
    pace = measured((0.1, 100), (0.1, 100), (0.1, 101))
    assert pace.predict(50) == pytest.approx(0.05, rel=0.01)


def test_it_is_never_negative() -> None:
    assert measured((0.2, 100), (0.1, 400)).predict(10_000) == pytest.approx(0.15), "more tokens take no less"
    late = measured((0.01, 100), (0.09, 200))
    assert (late.predict(0), late.predict(300)) == (0.0, pytest.approx(0.114, rel=0.01))


def test_the_last_measurements_count_most() -> None:
    pace = measured(*[(1.0, 100)] * 20, *[(0.1, 100)] * 20)
    assert pace.predict(100) == pytest.approx(0.1, rel=0.15)

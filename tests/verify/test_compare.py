"""The comparison reports the first difference and its position; equal answers are equal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from baton.verify import Case, Observed, compare_answers
from baton.verify.acceptance_check import Acceptance
from baton.verify.case_options import Bounds, parse_lengths, parse_modes
from baton.verify.compare import acceptance_rates
from baton.verify.report import format_reports
from baton.verify.sides import Answers

CASE = Case((1, 2, 3), SamplingParams())
ANSWER = Observed(
    token_ids=(5, 6, 7, 8, 9),
    logprobs=(-0.1, -0.2, -0.3, -0.4, -0.5),
    finish_reason="length",
    num_prompt_tokens=3,
    num_completion_tokens=5,
    accepted=(1, 0, 0),
    num_speculative_tokens=2,
)


def first_difference(other: Observed) -> str:
    report = compare_answers("push", [CASE], [ANSWER], [other])
    assert report.num_identical == 1 - len(report.differences)
    return str(report.differences[0]) if report.differences else ""


def test_equal_answers_are_identical() -> None:
    assert first_difference(ANSWER) == ""
    assert first_difference(replace(ANSWER, accepted=None)) == ""
    assert first_difference(replace(ANSWER, accepted=(), num_speculative_tokens=0)) == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token_ids": (5, 6, 1, 8, 9)}, "token 2: expected 7, got 1 (draft round 0, draft position 2)"),
        ({"token_ids": (4, 6, 7, 8, 9)}, "token 0: expected 5, got 4 (first token)"),
        ({"token_ids": (5, 6, 7, 8)}, "5 tokens expected, got 4"),
        ({"logprobs": (-0.1, -0.2, -0.3, -0.4, math.nan)}, "logprob of token 4"),
        ({"logprobs": (-0.1,)}, "5 logprobs expected, got 1"),
        ({"finish_reason": "stop"}, "finish_reason: expected length, got stop"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens"),
        ({"accepted": (1, 1, 0)}, "acceptance of round 1 (from token 3): expected 0 drafts, got 1: draft position 1"),
        ({"accepted": (1, 0)}, "3 draft rounds expected, got 2"),
        ({"error": "HTTP 500: boom"}, "no answer from the candidate: HTTP 500: boom"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_first_difference_is_named(change: dict[str, object], expected: str) -> None:
    found = first_difference(replace(ANSWER, **change))  # type: ignore[arg-type]
    assert found.startswith("request 0 (prompt of 3 tokens): ")
    assert expected in found


def test_acceptance_is_per_position() -> None:
    assert acceptance_rates([ANSWER, replace(ANSWER, accepted=(2,))]) == [0.5, 0.25]
    assert acceptance_rates([replace(ANSWER, accepted=())]) == []


def test_report_ends_in_the_count() -> None:
    text = format_reports([compare_answers("push", [CASE] * 7, [ANSWER] * 7, [replace(ANSWER, token_ids=(1,))] * 7)])
    assert text.splitlines()[-1] == "identical: 0/7"
    assert "and 2 more" in text


def test_options_are_checked() -> None:
    assert parse_lengths("1-3,9") == [1, 2, 3, 9]
    with pytest.raises(ConfigError, match="modes"):
        parse_modes("push,sideways")


@pytest.mark.parametrize("bad", ["", "0-3", "5-1", "a"])
def test_a_malformed_range_of_lengths_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        parse_lengths(bad)


def test_the_reference_has_one_figure_in_all_rows() -> None:
    """Its counters, which include drafts beyond an answer's end, also if the candidate does not draft."""
    counters = Acceptance(3, (2, 1))
    want, plain = Answers([ANSWER], counters), Answers([replace(ANSWER, accepted=())], "no drafts")
    bounds = Bounds.parse(None, None, 0.01, acceptance_required=False, servers=False, temperature=0.0)
    for have in (Answers([ANSWER], counters), plain):
        assert bounds.check(want, have).reference == counters

"""A slice of the benchmark of structured output."""

from __future__ import annotations

from benchmarks.demo import SPECULATIVE
from benchmarks.engine.structured import alone, check, draw_schemas, params_of, supported


def test_answers_are_the_same_with_speculation_and_valid() -> None:
    schemas = supported(draw_schemas(16), 12)
    assert len(schemas) == 12
    params = params_of(schemas)
    expected, _, _ = alone(params, None)
    answers, _, _ = alone(params, SPECULATIVE)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert check(schemas, answers) >= 8
    assert sum(sum(answer.accepted) for answer in answers) > 0
